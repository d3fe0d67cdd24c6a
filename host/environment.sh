# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# Which variables pass into the image: the tables, and how a value gets there unread. Sourced by containers/run.sh.

# The rest of both tables, and FILES, is in passed.txt, which Python reads too.
readonly TABLE=$checkout/entrypoint/plan/passed.txt
PASSED=('SLURM_*' 'SLURMD_*' 'PBS_*' NCPUS 'APPTRAIN_*') # the allocation, and our own options
NEVER=(
    'PYTHON*' 'LD_*' VIRTUAL_ENV 'CONDA_*'               # they would mix the host's software into the image's
    PATH PREPEND_PATH APPEND_PATH LANG 'LC_*' HOME PWD   # the image's own, or set here
    APPTRAIN_STACK APPTRAIN_IMAGE_ID APPTRAIN_OUTCOME APPTRAIN_NOT_PASSED TMPDIR
)
FILES=() # paths, which pass if the image shows what is there
readonly CACHES=(TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MPLCONFIGDIR XDG_CACHE_HOME)
readonly FOREIGN='@(APPTAINER|SINGULARITY)@(_|ENV_)*' HARMLESS='@(APPTAINER|SINGULARITY)_@(CACHEDIR|TMPDIR|CONFIGDIR)'

# Adds what the file has to PASSED, NEVER and FILES.
read_table() {
    local words
    [[ -r $TABLE ]] || refuse "$TABLE is not there or cannot be read: use a whole checkout"
    while read -r -a words; do
        case ${words[0]-} in
            pass) PASSED+=("${words[@]:1}") ;;
            file) FILES+=("${words[@]:1}") ;;
            never) NEVER+=("${words[@]:1}") ;;
        esac
    done <"$TABLE"
}

is_utf8() {
    local two=$'[\xc2-\xdf]' more=$'[\x80-\xbf]' bytes
    if [[ $1 != *[$'\x80'-$'\xff']* ]]; then return; fi
    bytes="[^"$'\x80-\xff'"]|$two$more|"$'\xe0[\xa0-\xbf]'"$more|"$'[\xe1-\xec\xee\xef]'"$more$more"
    bytes+="|"$'\xed[\x80-\x9f]'"$more"
    bytes+="|"$'\xf0[\x90-\xbf]'"$more$more|"$'[\xf1-\xf3]'"$more$more$more|"$'\xf4[\x80-\x8f]'"$more$more"
    [[ $1 =~ ^($bytes)*$ ]]
}

any_of() { local IFS='|'; printf '@(%s)' "$*"; }

# Sets `names` and `values` that pass, `left_out`, the names of those that do not, and `foreign`, those that would
# steer Apptainer.
read_environment() {
    local entry name value word asked passed never caches kept files refused='' replaced='' unseen=''
    read_table
    read -r -d '' -a asked < <(printf '%s\0' "${passes[*]-} ${APPTRAIN_PASS:-}")
    passed=$(any_of "${PASSED[@]}" "${FILES[@]}" ${asked[@]+"${asked[@]}"}) never=$(any_of "${NEVER[@]}")
    files=$(any_of "${FILES[@]}") caches=$(any_of "${CACHES[@]}") kept=$(any_of ${asked[@]+"${asked[@]}"})
    # shellcheck disable=SC2053 # the right sides are patterns
    for word in ${asked[@]+"${asked[@]}"}; do
        [[ $word =~ ^[A-Za-z_][A-Za-z0-9_]*\*?$ ]] ||
            refuse "APPTRAIN_PASS: $word is not NAME or PREFIX_*: give names with blanks between them"
        [[ $word != $never ]] || refuse "APPTRAIN_PASS: $word never passes: set it in CMD, with env NAME=VALUE"
    done
    names=() values=() left_out=() foreign=()
    # shellcheck disable=SC2053
    for entry in "${_environment[@]}"; do
        name=${entry%%=*} value=${entry#*=}
        if [[ $name == $FOREIGN ]]; then
            [[ $name == $HARMLESS ]] || foreign+=("$name")
        elif [[ $name == $caches && $name != $kept ]]; then
            replaced+=" $name"
        elif [[ $name == $files && $name != $kept ]] && ! is_shown "$(readlink -f -- "$value")"; then
            unseen+=" $name"
        elif [[ $name == $passed && $name != $never && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
            if is_utf8 "$value"; then names+=("$name") values+=("$value"); else refused+=" $name"; fi
        elif [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ && $name != APPTRAIN_* ]]; then
            left_out+=("$name")
        fi
    done
    [[ -z $refused ]] || say_for_node "not passed, the value is not UTF-8:$refused"
    [[ -z $replaced ]] || say_for_job "set to directories on each node's disk:$replaced (APPTRAIN_PASS keeps yours)"
    [[ -z $unseen ]] ||
        say_for_job "not passed, the image does not show their files:$unseen (APPTRAIN_BIND shows them)"
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
    give APPTRAIN_NOT_PASSED "${left_out[*]+${left_out[*]:0:1000}}" # names alone
    give TMPDIR "$tmp"
    give PYTHONNOUSERSITE 1
    for i in "${CACHES[@]}"; do give_if_unset "$i" "$tmp/${i,,}"; done
    # They follow XDG_CACHE_HOME, but hold what was downloaded for many runs.
    give_if_unset HF_HOME "$cache/huggingface"
    give_if_unset TORCH_HOME "$cache/torch"
}
