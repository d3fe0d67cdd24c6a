# shellcheck shell=bash disable=SC2016,SC2034
# Made from delta.yaml by `make profiles`: change that file, not this one.
site_digest='c75107aafbd7840cca488e371d1a67efb5c65d9963a97b4eabf55bfe0cea570f'
site_scheduler='slurm'
site_clusters=()
site_module_paths=()
site_modules=()
site_apptainer=''
site_image='image.sif'
site_binds=('/projects')
site_pass=()
site_scratch=''
site_start=''
site_launcher_args=()
site_gpus=''
