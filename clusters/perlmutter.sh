# shellcheck shell=bash disable=SC2016,SC2034
# Made from perlmutter.yaml by `make profiles`: change that file, not this one.
site_digest='f619b671392f01a4f39083f5e37ce0c1ba322fa8004d48dbd719a345d6a3c6eb'
site_scheduler='slurm'
site_clusters=('perlmutter')
site_module_paths=()
site_modules=()
site_apptainer='$HOME/apptainer/bin/apptainer'
site_image='image.sif'
site_binds=()
site_pass=()
site_scratch='$PSCRATCH'
site_start=''
site_launcher_args=()
site_gpus=''
