#!/usr/bin/env bash
# Run a command inside the image on this node. The only place that knows `apptainer exec`.
#
# Usage: containers/run.sh [OPTION...] IMAGE CMD [ARG...]   IMAGE is a SIF file or an unpacked image
#        --show            print the command line, what is bound and why, and which variables pass; start nothing
#        --bind WHY SPEC   show a further path, SRC[:DST[:ro]]; WHY is for messages
#        --pass NAME       pass a further variable, NAME or PREFIX_*
#        --venv DIR        make its bin/ the first in PATH (else APPTRAIN_VENV)
#        --script FILE     what CMD runs, for its directory to be shown
#        --outcome FILE    what says how CMD ended, if it cannot; in FILE's name %a is the attempt, %n the node's rank and
#                          %t the task's number there
#        --cpu             no GPU is expected
#        --all-of-host     show every top-level directory of the host that the image lacks
#        --quiet           say nothing but why it cannot run
# Reads: APPTRAIN_APPTAINER   the program (else apptainer, else singularity, from PATH)
#        APPTRAIN_BIND        further paths to show inside, SRC[:DST[:ro]], one a line
#        APPTRAIN_PASS        further variables to pass, NAME or PREFIX_*
#        APPTRAIN_CUDA_COMPAT the node's directory with CUDA's forward compatibility, for a driver older than the stack
#        APPTRAIN_UNPACK=1    unpack the image for this run instead of mounting it
#        APPTRAIN_HOME, APPTRAIN_HAND, APPTRAIN_VENV, APPTRAIN_ATTEMPT
#        HOME, TMPDIR, APPTAINER_TMPDIR, and what Slurm or PBS say of this node
# Exit:  CMD's status, 128+N when signal N ended it · 64 it cannot run here, and one line says why ·
#        Apptainer's own status where it failed, after its own message and one of ours
#
# Paths are the same inside and outside, and of the variables only those pass that the table below names.
# docs/run.md has the reasons and the remedies.
set -euo pipefail
LC_ALL=C # bytes, not characters
# shellcheck source=containers/share.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/share.sh"
# shellcheck source=containers/common.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.sh"

readonly PASSED=(
    # The allocation, and our own options.
    'SLURM_*' 'SLURMD_*' 'PBS_*' NCPUS 'APPTRAIN_*'
    # Which GPUs, and how CUDA treats them. Not CUDA_*: modules set CUDA_HOME and the like to paths of the host.
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING 'CUDA_MPS_*'
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE
    # Communication, threads, kernels, torch.
    'NCCL_*' 'GLOO_*' 'UCX_*' 'FI_*' 'OMP_*' 'GOMP_*' 'KMP_*' 'MKL_*' 'OPENBLAS_*' 'DNNL_*' 'ONEDNN_*' ATEN_CPU_CAPABILITY
    'TORCH_*' 'PYTORCH_*' 'TORCHDYNAMO_*' 'TORCHINDUCTOR_*' 'TRITON_*'
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
readonly SHARED='correct it, or use a directory that all nodes share'
readonly TMP_MB=256  # free, for compiled kernels and the like
readonly SHM_MB=1024 # free, for the batches of DataLoader's workers and for NCCL
readonly UNPACKED=2  # times its packed size; measured: 1.7

# --- what is said, and how it ends ---------------------------------------------------------------------------

say() {
    local text=$*
    printf 'run.sh: %s: %s\n' "$node" "${text//$'\n'/\\n}" >&2
}

# Says what is the same for all tasks of a node, or of the job: by the first of them.
say_for_node() { if [[ -z $quiet && ${SLURM_LOCALID:-0} == 0 ]]; then say "$*"; fi; }
say_for_job() { if [[ ${node_rank:-0} == 0 ]]; then say_for_node "$*"; fi; }

refuse() {
    say "$*"
    tell_outcome "$REFUSED" "$*"
    exit "$REFUSED"
}

# A node whose entrypoint left no outcome ends the others' wait.
tell_outcome() {
    [[ -z $outcome ]] || write_outcome "$outcome" "$1" "$node" "$2" || say "the outcome (status $1) could not be written to $outcome"
}

clean_up() {
    trap '' HUP INT TERM USR1 USR2
    if [[ -n $opened ]]; then close_share 2>/dev/null || true; fi
    [[ -n $tmp ]] || return 0
    rm -rf -- "$tmp" 2>/dev/null && return
    # What was unpacked may hold directories without write permission.
    chmod -R u+rwX -- "$tmp" 2>/dev/null || true
    rm -rf -- "$tmp" 2>/dev/null || say "$tmp could not be removed"
}

# --- what is to run -------------------------------------------------------------------------------------------

# Sets what the options say; `rest` is what stands behind them.
read_options() {
    show_only='' outcome='' venv=${APPTRAIN_VENV:-} script='' device='' all_of_host='' quiet='' binds=() passes=()
    while (($#)) && [[ $1 == --* ]]; do
        case $1 in
            --show) show_only=yes ;;
            --cpu) device=cpu ;;
            --all-of-host) all_of_host=yes ;;
            --quiet) quiet=yes ;;
            --bind) binds+=("${2-}" "${3-}") && shift $(($# > 2 ? 2 : $# - 1)) ;;
            --pass) passes+=("${2-}") && shift ;;
            --venv | --script | --outcome) printf -v "${1#--}" %s "${2-}" && shift ;;
            *) refuse "$1 is no option of run.sh: an option of CMD comes behind it" ;;
        esac
        if (($#)); then shift; fi
    done
    rest=("$@")
}

# Sets the name of `outcome` for this task, and removes what an earlier run left there.
find_outcome() {
    local name=${outcome##*/}
    node_rank=${SLURM_NODEID:-${PBS_NODENUM:-${APPTRAIN_NODE_RANK:-}}}
    [[ -n $outcome ]] || return 0
    name=${name//%a/${APPTRAIN_ATTEMPT:-0}} name=${name//%n/${node_rank:-0}} name=${name//%t/${SLURM_LOCALID:-0}}
    if [[ -n $show_only || ! $name =~ ^[0-9.]+$ ]]; then outcome='' && return; fi
    outcome=${outcome%/*}/$name
    if ! { mkdir -p -- "${outcome%/*/*/*}/" && (umask 077 && mkdir -p -- "${outcome%/*}") && rm -f -- "$outcome"; } 2>/dev/null; then
        name=${outcome%/*/*} outcome=''
        refuse "the run directory $name cannot be made: give another in APPTRAIN_RUN_DIR, which all nodes share"
    fi
}

# --- the program and the image ----------------------------------------------------------------------------------

# Sets `apptainer`, its `package`, `version` and `libexec`, the `prefix` of its variables, and `setuid`.
find_apptainer() {
    local name value least=1.2
    if [[ -n ${APPTRAIN_APPTAINER:-} ]]; then
        apptainer=$(type -P -- "$APPTRAIN_APPTAINER") ||
            refuse "APPTRAIN_APPTAINER=$APPTRAIN_APPTAINER is no program here: give the path of apptainer or singularity"
    else
        apptainer=$(type -P apptainer || type -P singularity) ||
            refuse "neither apptainer nor singularity is in PATH: load the site's module, or give its path in APPTRAIN_APPTAINER"
    fi
    package='' version='' libexec='' setuid=''
    while IFS='=' read -r name value; do
        case $name in
            PACKAGE_NAME) package=${value%-ce} ;;
            PACKAGE_VERSION) version=$value ;;
            LIBEXECDIR) libexec=$value ;;
        esac
    done < <("$apptainer" buildcfg 2>/dev/null)
    [[ $package == @(apptainer|singularity) ]] ||
        refuse "$apptainer does not say what it is (\`buildcfg\`): give the path of apptainer or singularity in APPTRAIN_APPTAINER"
    if [[ $package == singularity ]]; then least=3.10; fi
    is_at_least "$least" ||
        refuse "$apptainer is $package $version: $least or newer is needed, for --no-eval: load a newer module, or give another in APPTRAIN_APPTAINER"
    libexec+=/$package/bin prefix=${package^^}
    if [[ -u $libexec/starter-suid ]]; then setuid=yes; fi
}

is_at_least() {
    [[ $version =~ ^([0-9]+)\.([0-9]+) ]] || return 1
    ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= ${1%.*} * 1000 + ${1#*.}))
}

check_user_namespaces() {
    local file
    if [[ -n $setuid ]] || ((EUID == 0)); then return; fi
    for file in /proc/sys/user/max_user_namespaces /proc/sys/kernel/unprivileged_userns_clone; do
        if [[ -r $file && $(<"$file") == 0 ]]; then
            refuse "this node allows no user namespaces ($file is 0), and $package here is not setuid: ask the administrator to allow them, or for $package-suid"
        fi
    done
}

# Checks IMAGE, and sets `image`, its `kind` (sif, directory), `bytes`, and `image_id`, which every build makes anew.
# Nothing but a file is opened: a fifo would hang.
check_image() {
    local header arch ours size
    image=$(absolute "$1") image_id=
    [[ -e $image ]] || refuse "there is no image $image on this node, or its directory may not be searched: make image, or give a path that all nodes share"
    [[ -r $image ]] || refuse "the image $image may not be read: ask its owner for chmod a+r"
    if [[ -d $image ]]; then
        [[ -d $image/.singularity.d ]] || refuse "$image is a directory, but no unpacked image (it has no .singularity.d): give a SIF file"
        kind=directory
        return
    fi
    [[ -f $image ]] || refuse "the image $image is no file: give a SIF file"
    kind=sif bytes=$(stat -L -c %s -- "$image")
    header=$(od -An -v -tx1 -j32 -N32 -- "$image" 2>/dev/null | tr -d ' \n') || true
    [[ $header == 5349465f4d4147494300* && $bytes -ge 128 ]] || refuse "$image is no SIF file: give one, such as make image makes"
    arch=${header:26:4}
    case $(uname -m) in
        x86_64) ours=3032 ;; aarch64) ours=3034 ;; ppc64le) ours=3036 ;; riscv64) ours=3132 ;; *) ours=$arch ;;
    esac
    [[ $arch == "$ours" || $arch == 3030 ]] ||
        refuse "the image $image is for another kind of processor than this node's $(uname -m): make one on such a node"
    [[ ${header:32} =~ ^(.{8})(.{4})(.{4})(.{4})(.{12})$ ]] && printf -v image_id '%s-%s-%s-%s-%s' "${BASH_REMATCH[@]:1}"
    read -r size header < <(od -An -v -tu8 -j112 -N16 -- "$image") || true
    ((size + header <= bytes)) ||
        refuse "the image $image is cut off: it has $bytes of $((size + header)) bytes: copy or make it again"
}

# Sets `unmounted` to why this node does not mount the image, and `mounters` to where Apptainer looks for the program that
# does; a setuid Apptainer does so in ways of its own.
find_mount() {
    mounters="$libexec:$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    unmounted=
    [[ ${APPTRAIN_UNPACK:-0} == [01] ]] || refuse "APPTRAIN_UNPACK=$APPTRAIN_UNPACK: must be 1 or 0"
    if [[ $kind == directory ]]; then
        return
    elif [[ ${APPTRAIN_UNPACK:-0} == 1 ]]; then
        unmounted="APPTRAIN_UNPACK=1"
    elif [[ -n $setuid ]]; then
        return
    elif [[ -z $(PATH=$mounters type -P squashfuse_ll squashfuse) ]]; then
        unmounted="it has no squashfuse"
    elif [[ ! -r /dev/fuse || ! -w /dev/fuse ]]; then
        unmounted="/dev/fuse may not be opened"
    elif [[ $package == singularity ]] && ! is_at_least 4.1; then
        unmounted="singularity $version mounts only where it is setuid"
    fi
}

# Sets `unpack`, the option that unpacks the image, after a check for room.
choose_unpacking() {
    local place need free
    place=${APPTAINER_TMPDIR:-${SINGULARITY_TMPDIR:-$tmp}}
    [[ -d $place && -w $place ]] || refuse "APPTAINER_TMPDIR $place is no directory that may be written: $SHARED"
    need=$((bytes * UNPACKED / 1000000 + 1)) free=$(free_mb "$place")
    ((free >= need)) ||
        refuse "this node does not mount the image ($unmounted), and $place, where it would be unpacked, has $free MB free of the $need MB needed: give a larger node-local directory in APPTAINER_TMPDIR"
    say_for_node "this node does not mount the image ($unmounted): unpacking it to $place, about $need MB, for this run"
    export "${prefix}_TMPDIR=$place"
    unpack=--unsquash
    if [[ $package == singularity ]]; then unpack=--tmp-sandbox; fi
    if [[ $package == singularity ]] && ! is_at_least 4.1; then unpack=''; fi
}

# --- what is shown inside ----------------------------------------------------------------------------------------

# Whether this path is shown already, by itself or in a directory that may be written.
is_shown() {
    local i
    for ((i = 0; i < ${#targets[@]}; i++)); do
        if [[ $1 == "${targets[i]}" ]]; then return; fi
        if [[ ${modes[i]} == rw && ${sources[i]} == "${targets[i]}" && $1 == "${targets[i]}"/* ]]; then return; fi
    done
    return 1
}

# Whether a directory of this name belongs to the image, where the host's must not hide it.
is_of_image() {
    case $1 in
        / | /usr | /usr/* | /etc | /etc/* | /bin | /sbin | /lib | /lib64 | /opt | /var | /run | /home | /boot | \
            /dev | /dev/* | /proc | /proc/* | /sys | /sys/*) ;;
        *) return 1 ;;
    esac
}

bind() {
    local source=$1 target=$2 mode=$3 reason=$4
    is_utf8 "$source$target" || refuse "$reason $source: the name is not UTF-8, which $package cannot bind: rename it"
    sources+=("$source") targets+=("$target") modes+=("$mode") reasons+=("$reason")
}

# Shows a path inside as it is outside: as spelled, and what its symlinks lead to.
show() {
    local reason=$1 mode=${3:-rw} path real
    path=$2
    if [[ $path != /* || $path/ == */@(|.|..)/* ]]; then path=$(realpath -ms -- "$path"); fi
    [[ -e $path ]] || refuse "$reason $path is not there on this node: $SHARED"
    real=$(readlink -f -- "$path")
    for path in "$real" "$path"; do
        if [[ $reason != @(APPTRAIN_BIND|APPTRAIN_CUDA_COMPAT|"the profile's") ]] && is_of_image "$path"; then continue; fi
        is_shown "$path" || bind "$path" "$path" "$mode" "$reason"
    done
}

bind_asked_for() {
    local line lines
    IFS=$'\n' read -r -d '' -a lines < <(printf '%s\0' "${APPTRAIN_BIND:-}")
    for line in ${lines[@]+"${lines[@]}"}; do bind_one APPTRAIN_BIND "$line"; done
}

# bind_one WHY SPEC
bind_one() {
    local source=$2 target='' mode=''
    if [[ ! -e $2 ]]; then IFS=: read -r source target mode < <(printf '%s\n' "$2"); fi
    target=${target:-$source} mode=${mode:-rw}
    [[ $source == /* && $target == /?* && $mode == @(rw|ro) ]] ||
        refuse "$1: $2 is not SRC[:DST[:ro]] with paths from /: give one bind a line"
    if [[ $source == "$target" ]]; then
        show "$1" "$source" "$mode"
    elif [[ -e $source ]]; then
        is_shown "$target" || bind "$source" "$target" "$mode" "$1"
    else
        refuse "$1 $source is not there on this node: $SHARED"
    fi
}

# What is large comes first: the rest may lie in it.
find_binds() {
    local name at
    sources=() targets=() modes=() reasons=()
    bind_asked_for
    show HOME "$HOME"
    for name in /tmp /var/tmp; do
        if [[ -d $name ]]; then show "the node's" "$name"; fi
    done
    for name in APPTRAIN_HOME SLURM_SUBMIT_DIR PBS_O_WORKDIR; do
        if [[ -n ${!name:-} ]]; then show "$name" "${!name}"; fi
    done
    show "the working directory" "$PWD"
    if [[ -n $script && -e $script ]]; then
        show "the directory of CMD" "$(dirname -- "$script")"
        show "the directory of CMD" "$(dirname -- "$(readlink -f -- "$script")")"
    fi
    if [[ -d ${APPTRAIN_HAND:-} && -O ${APPTRAIN_HAND:-} ]]; then show "the job's own directory" "$APPTRAIN_HAND"; fi
    if [[ -n $all_of_host ]]; then show_host; fi
    for ((at = 0; at < ${#binds[@]}; at += 2)); do bind_one "${binds[at]}" "${binds[at + 1]}"; done
    if [[ -n $venv ]]; then show APPTRAIN_VENV "$venv"; fi
    if [[ -n $compat ]]; then
        show APPTRAIN_CUDA_COMPAT "$compat" ro
        show APPTRAIN_CUDA_COMPAT "$(dirname -- "$(readlink -f -- "$compat/libcuda.so.1")")" ro
    fi
    if [[ -n $share ]]; then show TMPDIR "${tmp%/*}"; else show TMPDIR "$tmp"; fi # every task has its own
    # One that is missing is the entrypoint's to explain. PBS's lies in its spool.
    for name in PBS_NODEFILE APPTRAIN_NODEFILE APPTRAIN_ARGS_FILE APPTRAIN_JOIN_KEY_FILE APPTRAIN_RUN_DIR; do
        if [[ -e ${!name:-} ]]; then show "$name" "${!name}"; fi
    done
}

# Every top-level directory that the image does not have, but for an automounter's, which would mount all that it knows.
show_host() {
    local path automounted
    automounted=$(sed -n 's/^\([^ ]* \)\{4\}\([^ ]*\) .* - autofs .*/\2/p' /proc/self/mountinfo)
    for path in /*/; do
        path=${path%/}
        if [[ $'\n'$automounted$'\n' == *$'\n'"$path"$'\n'* || ! -x $path ]]; then continue; fi
        if [[ $path == /home ]]; then
            bind "$path" "$path" rw "the host's"
        elif [[ $path != @(/root|/mnt|/media|/srv|/lost+found) ]]; then
            show "the host's" "$path"
        fi
    done
}

# Sets `venv`, and `venv_python`, the image's Python that it was made with.
find_venv() {
    [[ -n $venv ]] || return 0
    venv=$(absolute "$venv")
    local made=$venv/pyvenv.cfg
    [[ -r $made && (-e $venv/bin/python || -L $venv/bin/python) ]] ||
        refuse "APPTRAIN_VENV=$venv is no venv, it has no pyvenv.cfg or no bin/python: make it with make venv DIR=$(printf %q "$venv")"
    [[ $venv != *:* ]] || refuse "APPTRAIN_VENV=$venv has a colon in it, which PATH cannot hold: make it elsewhere"
    grep -Eqx 'include-system-site-packages *= *true' -- "$made" ||
        refuse "APPTRAIN_VENV=$venv does not see the image's packages: make it with make venv DIR=$(printf %q "$venv")"
    venv_python=$(sed -nE 's/^home *= *//p' -- "$made")/python$(sed -nE 's/^version(_info)? *= *([0-9]+\.[0-9]+).*/\2/p' -- "$made")
}

# --- the run's own directory on the node's disk ---------------------------------------------------------------------

free_mb() { echo $(($(stat -f -c '%a * %S' -- "$1") / 1000000)); }

# Sets `tmp`, in the first place that has room and lets programs run.
make_tmp() {
    local place why unfit='' seen=:
    for place in "${SLURM_TMPDIR:-}" "${TMPDIR:-}" /tmp; do
        [[ $place == /* && $seen != *":$place:"* ]] || continue
        seen+=$place:
        if [[ ! -d $place || ! -w $place || ! -x $place ]]; then
            why="is no directory that may be written"
        elif (($(free_mb "$place") < TMP_MB)); then
            why="has less than $TMP_MB MB free"
        elif ! tmp=$(mktemp -d -- "${place%/}/apptrain.XXXXXX" 2>/dev/null); then
            why="may not be written" tmp=''
        elif ! { printf '#!/bin/sh\n' >"$tmp/.start" && chmod 700 "$tmp/.start" && "$tmp/.start"; } 2>/dev/null; then
            why="is full, or lets no program run (noexec)"
            rm -rf -- "$tmp"
            tmp=''
        else
            [[ -z $unfit ]] || say_for_node "$unfit: temporary files go to $place"
            return
        fi
        unfit+="${unfit:+, }$place $why"
    done
    refuse "$unfit: give a directory on the node's own disk in TMPDIR"
}

check_shm() {
    local free
    if [[ ! -d /dev/shm || ! -w /dev/shm ]]; then
        say_for_node "/dev/shm is not there or may not be written: DataLoader's workers and NCCL will fail (use no workers, NCCL_SHM_DISABLE=1)"
    elif free=$(free_mb /dev/shm) && ((free < SHM_MB)); then
        say_for_node "/dev/shm has $free MB free, less than $SHM_MB: DataLoader's workers and NCCL may fail (use fewer workers, NCCL_SHM_DISABLE=1)"
    fi
}

# --- what passes ------------------------------------------------------------------------------------------------------

is_utf8() {
    local two=$'[\xc2-\xdf]' more=$'[\x80-\xbf]' bytes
    if [[ $1 != *[$'\x80'-$'\xff']* ]]; then return; fi
    bytes="[^"$'\x80-\xff'"]|$two$more|"$'\xe0[\xa0-\xbf]'"$more|"$'[\xe1-\xec\xee\xef]'"$more$more|"$'\xed[\x80-\x9f]'"$more"
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
    # Not from bash's own list, which lacks names that are no identifiers.
    # shellcheck disable=SC2053
    while IFS= read -r -d '' entry; do
        name=${entry%%=*} value=${entry#*=}
        if [[ $name == $FOREIGN ]]; then
            [[ $name == $HARMLESS ]] || foreign+=("$name")
        elif [[ $name == $caches && $name != $kept ]]; then
            replaced+=" $name"
        elif [[ $name == $passed && $name != $never && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
            if is_utf8 "$value"; then names+=("$name") values+=("$value"); else refused+=" $name"; fi
        fi
    done < <(env -0)
    [[ -z $refused ]] || say_for_node "not passed, the value is not UTF-8:$refused"
    [[ -z $replaced ]] || say_for_job "set to directories on each node's disk:$replaced (APPTRAIN_PASS keeps yours)"
    ((${#foreign[@]} == 0)) || say_for_job "not obeyed: ${foreign[*]} (APPTRAIN_BIND and APPTRAIN_PASS are for that)"
}

# Hands a variable to CMD: Apptainer takes the prefix off, and with --no-eval no shell reads the value.
give() {
    given+=("$1")
    export "${prefix}ENV_$1=$2"
}

give_if_unset() { if [[ " ${given[*]-} " != *" $1 "* ]]; then give "$1" "$2"; fi; }

# Sets `given` and `cleared`, foreign names that bash cannot unset. One of them, APPTAINERENV_A-B, loses all variables.
pass_environment() {
    local i user cache=${XDG_CACHE_HOME:-$HOME/.cache}
    given=() cleared=()
    for i in ${foreign[@]+"${foreign[@]}"}; do
        if [[ $i =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then unset "$i"; else cleared+=(-u "$i"); fi
    done
    for ((i = 0; i < ${#names[@]}; i++)); do give "${names[i]}" "${values[i]}"; done
    user=$(id -un)
    give_if_unset USER "$user" # PBS sets neither in a task
    give_if_unset LOGNAME "$user"
    if [[ -n $image_id ]]; then give APPTRAIN_IMAGE_ID "$image_id"; fi
    if [[ -n $outcome ]]; then give APPTRAIN_OUTCOME "$outcome"; fi
    if [[ -n $compat ]]; then give LD_LIBRARY_PATH "$compat"; fi # Apptainer adds what --nv brings behind it
    give TMPDIR "$tmp"
    give PYTHONNOUSERSITE 1
    give_if_unset TRITON_CACHE_DIR "$tmp/triton"
    give_if_unset TORCHINDUCTOR_CACHE_DIR "$tmp/inductor"
    give_if_unset MPLCONFIGDIR "$tmp/matplotlib"
    give_if_unset XDG_CACHE_HOME "$tmp/cache"
    # They follow XDG_CACHE_HOME, but hold what was downloaded for many runs.
    give_if_unset HF_HOME "$cache/huggingface"
    give_if_unset TORCH_HOME "$cache/torch"
}

# Sets `nv` where there is a driver: --nv without one says nothing.
find_gpus() {
    local granted=${CUDA_VISIBLE_DEVICES:-}
    nv=
    if [[ -e /proc/driver/nvidia/version ]]; then
        nv=--nv
    elif [[ -n $granted && $granted != @(-1|NoDevFiles)* && $device != cpu ]]; then
        say_for_node "GPUs were granted (CUDA_VISIBLE_DEVICES=$granted), but this node has no NVIDIA driver (/proc/driver/nvidia/version): CMD will see none"
    fi
}

# Sets `compat`, where CUDA's forward compatibility lies. Its libcuda serves an older driver, but no node without one.
find_compat() {
    local asked=${APPTRAIN_CUDA_COMPAT:-} held has
    compat=
    [[ -n $asked ]] || return 0
    if [[ -z $nv ]]; then
        say_for_node "APPTRAIN_CUDA_COMPAT=$asked is not used: this node has no NVIDIA driver"
        return
    fi
    [[ -d $asked && -x $asked ]] || refuse "APPTRAIN_CUDA_COMPAT=$asked is no directory on this node: $SHARED"
    compat=$(readlink -f -- "$asked")
    [[ $compat != *[:\;]* ]] ||
        refuse "APPTRAIN_CUDA_COMPAT=$asked has a colon or a semicolon in it, which LD_LIBRARY_PATH cannot hold: give it another name"
    if [[ -r $compat/libcuda.so.1 ]]; then return; fi
    held=("$compat"/*) has='nothing'
    if [[ -e ${held[0]} ]]; then printf -v has '%s, ' "${held[@]##*/}"; has=${has%, }; fi
    if ((${#has} > 100)); then has=${has:0:100}...; fi
    refuse "APPTRAIN_CUDA_COMPAT=$asked has no libcuda.so.1 that may be read, it has $has: give the directory that the package cuda-compat made, such as /usr/local/cuda-13.2/compat"
}

# --- the start ---------------------------------------------------------------------------------------------------------

quoted() {
    local q="'" r="'\\''"
    printf "'%s'" "${1//$q/$r}"
}

# The paths that CMD names and this node has: as given, behind a =, and where a new file is to come.
named_paths() {
    local word path paths
    for word in "${command[@]}"; do
        paths=("$word")
        if [[ $word == *=* ]]; then paths+=("${word#*=}"); fi
        for path in "${paths[@]}"; do
            if [[ ! -e $path && $path == /?*/* && -d ${path%/*} ]]; then path=${path%/*}; fi
            if [[ -e $path ]]; then printf '%s\0' "$path"; fi
        done
    done
}

# Writes what runs first inside: it alone can say what the image has of its own. It leaves `started`, or `lacking`.
write_start() {
    local path
    {
        echo ": >$(quoted "$tmp/.started")"
        echo "lacks() { printf %s \"\$1\" >$(quoted "$tmp/.lacking"); exit $REFUSED; }"
        echo "export HOME=$(quoted "$HOME")"
        echo "cd $(quoted "$PWD"); unset OLDPWD" # Apptainer would say where its symlinks lead
        if [[ -n $venv ]]; then
            echo "[ -x $(quoted "$venv_python") ] || lacks venv"
            echo "export VIRTUAL_ENV=$(quoted "$venv") PATH=$(quoted "$venv/bin"):\"\$PATH\""
        fi
        while IFS= read -r -d '' path; do
            echo "[ -e $(quoted "$path") ] || lacks $(quoted "path $path")"
        done < <(named_paths)
        # shellcheck disable=SC2016 # for the shell inside
        echo 'command -v "$1" >/dev/null || lacks program; exec "$@"'
    } >"$tmp/.start"
}

# Has the process that shows the image outlive signals that are meant for CMD: some schedulers send them to every process
# of a task (Slurm's proctrack/linuxproc), and without its image CMD can save nothing, but dies of SIGBUS. Sets `shield`,
# a directory for PATH; empty where Apptainer mounts in another way, or brings a program of its own along.
shield_mount() {
    local program
    shield=
    [[ $kind == sif && -z $setuid$unmounted ]] || return 0
    program=$(PATH=$mounters type -P squashfuse_ll || PATH=$mounters type -P squashfuse) || return 0
    if [[ $program == "$libexec"/* ]]; then return; fi
    shield=$tmp/.mount
    mkdir -- "$shield"
    # shellcheck disable=SC2016 # for the shell that reads it
    printf '#!/bin/sh\ntrap "" HUP USR1 USR2 TERM\nexec %s "$@"\n' "$(quoted "$program")" >"$shield/${program##*/}"
    chmod 700 -- "$shield/${program##*/}"
}

# Sets `line`, the whole command line.
assemble() {
    local i field q='"'
    line=(${cleared[@]+env "${cleared[@]}"} ${shield:+env "PATH=$shield:$PATH"} "$apptainer" -q exec --cleanenv --no-eval --no-mount 'home,cwd,tmp'
        ${nv:+"$nv"} ${unpack:+"$unpack"})
    for ((i = 0; i < ${#targets[@]}; i++)); do
        field="type=bind,\"source=${sources[i]//$q/$q$q}\",\"destination=${targets[i]//$q/$q$q}\""
        if [[ ${modes[i]} == ro ]]; then field+=,ro; fi
        line+=(--mount "$field")
    done
    line+=(--pwd "$PWD" "$image" /bin/sh "$tmp/.start" "${command[@]}")
}

show_all() {
    local i path
    printf 'image    %s (%s%s)\nwith     %s (%s %s)\nstarts   in %s\n\nbinds\n' \
        "$image" "$kind" "${image_id:+ $image_id}" "$apptainer" "$package" "$version" "$PWD"
    for ((i = 0; i < ${#targets[@]}; i++)); do
        if [[ ${sources[i]} == "${targets[i]}" ]]; then path=${targets[i]}; else path=${sources[i]}:${targets[i]}; fi
        printf '  %s, %s  [%s]\n' "$path" "${modes[i]}" "${reasons[i]}"
    done
    printf '\nvariables\n'
    printf '  %s\n' "${given[@]}" | sort
    printf '\ncommand\n '
    printf ' %q' "${line[@]}"
    printf '\n'
}

# Runs `line` and sets `status`. From a terminal in the foreground, where Ctrl-C reaches CMD by itself.
run() {
    status=0
    if [[ ! -t 0 ]]; then
        run_child "${line[@]}"
    else
        trap : HUP INT TERM USR1 USR2
        { "${line[@]}" 2>&3 3>&- || status=$?; } 3>&2 2>/dev/null
    fi
}

# Refuses what the start found lacking in the image.
explain() {
    local lacking path folder
    [[ -e $tmp/.lacking ]] || return 0
    lacking=$(<"$tmp/.lacking")
    case $lacking in
        venv) refuse "APPTRAIN_VENV=$venv was made with $venv_python, which this image does not have: remove it, and make it in this image with make venv DIR=$(printf %q "$venv")" ;;
        program) refuse "CMD ${command[0]} is no program in the image: check the spelling, or bind it with APPTRAIN_BIND" ;;
    esac
    lacking=${lacking#path }
    path=$(readlink -f -- "$lacking") folder=$(dirname -- "$path")
    if [[ ! -d $path ]] && ! is_of_image "$folder"; then path=$folder; fi
    refuse "CMD names $lacking, which this node has but the image does not show: add a line to APPTRAIN_BIND: $path"
}

conclude() {
    local why="the entrypoint ended with status $status and left no outcome"
    ((status)) || return 0
    if [[ ! -e $tmp/.started && -z $signalled ]]; then
        why="$package ended with status $status before CMD began"
        say "$why: its own message stands above"
    fi
    tell_outcome "$status" "$why"
}

# Whether the container that the tasks share let this one not in.
share_failed() {
    [[ -n $entry && ! -e $tmp/.started && $status != 0 && -z $signalled ]] || return 1
    if [[ -z $opened ]]; then let_go; fi
    say "nsenter ended with status $status: this task mounts the image itself"
}

# Whether the image could not be mounted after all: a kernel that gives FUSE to root alone shows only now.
mount_failed() {
    [[ ! -e $tmp/.started && $status != 0 && -z $signalled && $kind == sif && -z $unmounted ]] || return 1
    unmounted=$("$apptainer" -q exec --cleanenv --no-mount home,cwd,tmp "$image" true 2>&1 >/dev/null) || true
    [[ $unmounted == *"image driver mount failure"* ]] || return 1
    unmounted=${unmounted##*exited: }
}

main() {
    local name
    node=$(uname -n) # not HOSTNAME, which Slurm carries over from the login node
    node=${SLURMD_NODENAME:-${node%%.*}}
    tmp='' node_rank='' unpack='' signalled='' opened=''
    trap clean_up EXIT
    for name in HUP:1 INT:2 TERM:15 USR1:10 USR2:12; do
        # shellcheck disable=SC2064
        trap "exit $((128 + ${name#*:}))" "${name%:*}"
    done
    read_options "$@"
    find_outcome
    set -- ${rest[@]+"${rest[@]}"}
    (($# > 1)) || refuse "usage: containers/run.sh [--show] [OPTION...] IMAGE CMD [ARG...]"
    is_utf8 "$*" || refuse "an argument is not UTF-8, which would arrive changed: rename the file, or encode it otherwise"
    if [[ -z ${HOME:-} ]]; then unset HOME && HOME=~; fi
    [[ -n ${PWD:-} && $PWD -ef . ]] || refuse "the current directory is not there any more: change to one that is"
    # PBS starts a task in a directory of its own. find_binds refuses one that is not there.
    if [[ -n ${PBS_O_WORKDIR:-} && . -ef ${PBS_JOBDIR:-$HOME} ]]; then cd -- "$PBS_O_WORKDIR" 2>/dev/null || true; fi
    command=("${@:2}")
    check_image "$1"
    find_apptainer
    check_user_namespaces
    find_mount
    make_tmp
    find_share
    check_shm
    find_venv
    find_gpus
    find_compat
    find_binds
    read_environment
    pass_environment
    [[ -z $unmounted ]] || choose_unpacking
    write_start
    shield_mount
    assemble
    if [[ -n $show_only ]]; then show_all && return; fi
    if [[ -n $share ]]; then
        { join_share 2>/dev/null || entry=''; } 4>&2
        if [[ -n $entry ]]; then line=(enter); else let_go; fi
    fi
    run
    if share_failed; then entry='' && assemble && run; fi
    if mount_failed; then choose_unpacking && assemble && run; fi
    explain
    conclude
    exit "$status"
}

main "$@"
