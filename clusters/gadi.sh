# shellcheck shell=bash disable=SC2016,SC2034
# Made from gadi.yaml by `make profiles`: change that file, not this one.
site_digest='1193582f031f9b3fc2dccf8ce86a7d3c2bb757c692084fa67aa51058b8f476a8'
site_scheduler='pbs'
site_clusters=('gadi-pbs')
site_module_paths=()
site_modules=('singularity')
site_apptainer=''
site_image='image-cu126.sif'
site_binds=()
site_pass=()
site_scratch='/scratch/$PROJECT/$USER'
site_start=''
site_launcher_args=()
site_gpus=''
