# shellcheck shell=bash disable=SC2016,SC2034
# Made from polaris.yaml by `make profiles`: change that file, not this one.
site_digest='31ef4d670bdae385cef8ad35e55d8ea6795ac155106b8c9a89e7f409053e834d'
site_scheduler='pbs'
site_clusters=('polaris-pbs-01' 'polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov')
site_module_paths=('/soft/modulefiles')
site_modules=('spack-pe-base/0.6.2' 'apptainer')
site_apptainer=''
site_image='image.sif'
site_binds=('/eagle')
site_pass=()
site_scratch=''
site_start='mpiexec'
site_launcher_args=()
site_gpus='4'
