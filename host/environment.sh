# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# Which variables pass into the image: the tables, and how a value gets there unread. Sourced by containers/run.sh.

readonly PASSED=(
    # The allocation, and our own options.
    'SLURM_*' 'SLURMD_*' 'PBS_*' NCPUS 'APPTRAIN_*'
    # Which GPUs, and how CUDA treats them. Not CUDA_*: modules set CUDA_HOME and the like to paths of the host.
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
    'CUDA_MPS_*' NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE
    # Communication, threads, kernels, torch.
    'NCCL_*' 'GLOO_*' 'UCX_*' 'FI_*' 'OMP_*' 'GOMP_*' 'KMP_*' 'MKL_*' 'OPENBLAS_*' 'DNNL_*' 'ONEDNN_*'
    ATEN_CPU_CAPABILITY 'TORCH_*' 'PYTORCH_*' 'TORCHDYNAMO_*' 'TORCHINDUCTOR_*' 'TRITON_*'
    # Services that training scripts talk to, who and where the user is, and the way out.
    'HF_*' 'WANDB_*' 'MLFLOW_*' 'ACCELERATE_*' USER LOGNAME TZ TERM COLUMNS LINES
    http_proxy https_proxy ftp_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY
)
readonly NEVER=(
    PBS_JOBCOOKIE SLURM_JWT                              # with them one can act as the job or as the user
    'PYTHON*' 'LD_*' VIRTUAL_ENV 'CONDA_*'               # they would mix the host's software into the image's
    PATH PREPEND_PATH APPEND_PATH LANG 'LC_*' HOME PWD   # the image's own, or set here
    APPTRAIN_STACK APPTRAIN_IMAGE_ID APPTRAIN_OUTCOME TMPDIR
)
readonly CACHES=(TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MPLCONFIGDIR XDG_CACHE_HOME)
readonly FOREIGN='@(APPTAINER|SINGULARITY)@(_|ENV_)*' HARMLESS='@(APPTAINER|SINGULARITY)_@(CACHEDIR|TMPDIR|CONFIGDIR)'

is_utf8() {
    local two=$'[\xc2-\xdf]' more=$'[\x80-\xbf]' bytes
    if [[ $1 != *[$'\x80'-$'\xff']* ]]; then return; fi
    bytes="[^"$'\x80-\xff'"]|$two$more|"$'\xe0[\xa0-\xbf]'"$more|"$'[\xe1-\xec\xee\xef]'"$more$more"
    bytes+="|"$'\xed[\x80-\x9f]'"$more"
    bytes+="|"$'\xf0[\x90-\xbf]'"$more$more|"$'[\xf1-\xf3]'"$more$more$more|"$'\xf4[\x80-\x8f]'"$more$more"
    [[ $1 =~ ^($bytes)*$ ]]
}

any_of() { local IFS='|'; printf '@(%s)' "$*"; }

# Sets `names` and `values` that pass, and `foreign`, those that would steer Apptainer.
read_environment() {
    local entry name value word asked passed never caches kept refused='' replaced=''
    read -r -d '' -a asked < <(printf '%s\0' "${passes[*]-} ${APPTRAIN_PASS:-}")
    passed=$(any_of "${PASSED[@]}" ${asked[@]+"${asked[@]}"}) never=$(any_of "${NEVER[@]}")
    caches=$(any_of "${CACHES[@]}") kept=$(any_of ${asked[@]+"${asked[@]}"})
    # shellcheck disable=SC2053 # the right sides are patterns
    for word in ${asked[@]+"${asked[@]}"}; do
        [[ $word =~ ^[A-Za-z_][A-Za-z0-9_]*\*?$ ]] ||
            refuse "APPTRAIN_PASS: $word is not NAME or PREFIX_*: give names with blanks between them"
        [[ $word != $never ]] || refuse "APPTRAIN_PASS: $word never passes: set it in CMD, with env NAME=VALUE"
    done
    names=() values=() foreign=()
    # shellcheck disable=SC2053
    for entry in "${_environment[@]}"; do
        name=${entry%%=*} value=${entry#*=}
        if [[ $name == $FOREIGN ]]; then
            [[ $name == $HARMLESS ]] || foreign+=("$name")
        elif [[ $name == $caches && $name != $kept ]]; then
            replaced+=" $name"
        elif [[ $name == $passed && $name != $never && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
            if is_utf8 "$value"; then names+=("$name") values+=("$value"); else refused+=" $name"; fi
        fi
    done
    [[ -z $refused ]] || say_for_node "not passed, the value is not UTF-8:$refused"
    [[ -z $replaced ]] || say_for_job "set to directories on each node's disk:$replaced (APPTRAIN_PASS keeps yours)"
    ((${#foreign[@]} == 0)) || say_for_job "not obeyed: ${foreign[*]} (APPTRAIN_BIND and APPTRAIN_PASS are for that)"
}

# Hands a variable to CMD: Apptainer takes the prefix off, and with --no-eval no shell reads the value.
give() { given+=("$1"); export "${prefix}ENV_$1=$2"; }

give_if_unset() { if [[ " ${given[*]-} " != *" $1 "* ]]; then give "$1" "$2"; fi; }

# Sets `given` and `cleared`, foreign names that bash cannot unset. One of them, APPTAINERENV_A-B, loses all variables.
pass_environment() {
    local i user cache=${XDG_CACHE_HOME:-$HOME/.cache}
    given=() cleared=()
    for i in ${foreign[@]+"${foreign[@]}"}; do
        if [[ $i =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then unset "$i"; else cleared+=(-u "$i"); fi
    done
    for ((i = 0; i < ${#names[@]}; i++)); do give "${names[i]}" "${values[i]}"; done
    user=${LOGNAME:-${USER:-$(id -un)}}
    give_if_unset USER "$user" # PBS sets neither in a task
    give_if_unset LOGNAME "$user"
    if [[ -n $image_id ]]; then give APPTRAIN_IMAGE_ID "$image_id"; fi
    if [[ -n $outcome ]]; then give APPTRAIN_OUTCOME "$outcome"; fi
    if [[ -n $compat ]]; then give LD_LIBRARY_PATH "$compat"; fi # Apptainer adds what --nv brings behind it
    give TMPDIR "$tmp"
    give PYTHONNOUSERSITE 1
    for i in "${CACHES[@]}"; do give_if_unset "$i" "$tmp/${i,,}"; done
    # They follow XDG_CACHE_HOME, but hold what was downloaded for many runs.
    give_if_unset HF_HOME "$cache/huggingface"
    give_if_unset TORCH_HOME "$cache/torch"
}
