# shellcheck shell=bash disable=SC2016,SC2034
# Made from generic-pbs.yaml by `make profiles`: change that file, not this one.
site_digest='f6d28f42313fd78beef605dd330ced1e3a2bea34ba6250483fe7ee65848272f3'
site_scheduler='pbs'
site_clusters=()
site_module_paths=()
site_modules=()
site_apptainer=''
site_image='image.sif'
site_binds=()
site_pass=()
site_scratch=''
site_start='pbsdsh'
site_launcher_args=()
site_gpus=''
