# shellcheck shell=bash disable=SC2016,SC2034
# Made from gwdg-grete.yaml by `make profiles`: change that file, not this one.
site_digest='148a4c31eaa93ae31ab59918e26812f42fbe3698beb22ddee88ac215c0a7ea10'
site_scheduler='slurm'
site_clusters=()
site_module_paths=()
site_modules=('apptainer')
site_apptainer=''
site_image='image.sif'
site_binds=()
site_pass=()
site_scratch=''
site_start=''
site_launcher_args=()
site_gpus=''
