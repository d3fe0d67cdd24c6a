# shellcheck shell=bash disable=SC2016,SC2034
# Made from generic.yaml by `make profiles`: change that file, not this one.
site_digest='abf3643c4e7b357eb2639727f93a2d1e177c714be344944f2051f45ebf15c232'
site_scheduler='slurm'
site_clusters=()
site_module_paths=()
site_modules=()
site_apptainer=''
site_image='image.sif'
site_binds=()
site_pass=()
site_scratch=''
site_start=''
site_launcher_args=()
site_gpus=''
