# shellcheck shell=bash disable=SC2016,SC2034
# Made from derecho.yaml by `make profiles`: change that file, not this one.
site_digest='7bd0760d72fc04c792d3b221abfc2f4b784f3f7be69a70c5c5cead5074f818ef'
site_scheduler='pbs'
site_clusters=('desched1')
site_module_paths=()
site_modules=('apptainer')
site_apptainer=''
site_image='image.sif'
site_binds=('/glade/work' '/glade/derecho/scratch')
site_pass=()
site_scratch='/glade/derecho/scratch/$USER'
site_start='mpiexec'
site_launcher_args=()
site_gpus='4'
