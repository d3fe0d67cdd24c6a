# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# Which variables pass into the image: the tables, and how a value gets there unread. Sourced by
# containers/run.sh.
# Reads: _environment  every variable as it was at the start, NAME=VALUE
#        passes        names that --pass gave
#        prefix        of the variables that Apptainer reads
#        obeys_binds   yes if its APPTAINER_BIND counts
#        checkout, image_id, outcome, compat, tmp, OF_ALLOCATION
# Sets:  names, values   read_environment: the variables that pass
#        left_out        read_environment: the names of those that do not
#        foreign         read_environment: the names of those that would steer Apptainer
#        given           pass_environment: the names of what CMD gets
#        cleared         pass_environment: words for env that take away what bash cannot unset

# The rest of both tables, and FILES, is in passed.txt, which Python reads too.
readonly TABLE=$checkout/entrypoint/plan/passed.txt
# The allocation, and our own options.
PASSED=("${OF_ALLOCATION[@]}" 'APPTRAIN_*')
NEVER=(
    # They would mix the host's software into the image's.
    'PYTHON*' 'LD_*' VIRTUAL_ENV 'CONDA_*'
    # The image's own, or set here.
    PATH PREPEND_PATH APPEND_PATH LANG 'LC_*' HOME PWD
    APPTRAIN_STACK APPTRAIN_IMAGE_ID APPTRAIN_OUTCOME APPTRAIN_NOT_PASSED APPTRAIN_PASSED
    TMPDIR
)
# Paths, which pass if the image shows what is there.
FILES=()
readonly CACHES=(TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MPLCONFIGDIR XDG_CACHE_HOME)
readonly FOREIGN='@(APPTAINER|SINGULARITY)@(_|ENV_)*'
readonly HARMLESS='@(APPTAINER|SINGULARITY)_@(CACHEDIR|TMPDIR|CONFIGDIR)'
readonly OF_BINDS='@(APPTAINER|SINGULARITY)_@(BIND|BINDPATH)'
readonly VALID_NAME='^[A-Za-z_][A-Za-z0-9_]*$'

# Adds what the file has to PASSED, NEVER and FILES.
read_table() {
    local words
    [[ -r $TABLE ]] ||
        refuse checkout-incomplete "$TABLE is not there or cannot be read: use a whole checkout"
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
    if [[ $1 != *[$'\x80'-$'\xff']* ]]; then
        return
    fi
    bytes="[^"$'\x80-\xff'"]|$two$more|"$'\xe0[\xa0-\xbf]'"$more|"$'[\xe1-\xec\xee\xef]'"$more$more"
    bytes+="|"$'\xed[\x80-\x9f]'"$more"
    bytes+="|"$'\xf0[\x90-\xbf]'"$more$more"
    bytes+="|"$'[\xf1-\xf3]'"$more$more$more"
    bytes+="|"$'\xf4[\x80-\x8f]'"$more$more"
    [[ $1 =~ ^($bytes)*$ ]]
}

# any_of NAME WORD...: sets the variable to a pattern that any of these words matches.
any_of() {
    local IFS='|'
    printf -v "$1" '@(%s)' "${*:2}"
}

# Sets `names` and `values`, `left_out` and `foreign`.
read_environment() {
    local entry name value word asked passed never caches kept files
    local refused='' replaced='' unseen=''
    read_table
    asked=()
    if [[ -n ${passes[*]-}${APPTRAIN_PASS:-} ]]; then
        read -r -d '' -a asked < <(printf '%s\0' "${passes[*]-} ${APPTRAIN_PASS:-}")
    fi
    any_of passed "${PASSED[@]}" "${FILES[@]}" ${asked[@]+"${asked[@]}"}
    any_of never "${NEVER[@]}"
    any_of files "${FILES[@]}"
    any_of caches "${CACHES[@]}"
    any_of kept ${asked[@]+"${asked[@]}"}
    # shellcheck disable=SC2053 # the right sides are patterns
    for word in ${asked[@]+"${asked[@]}"}; do
        [[ $word =~ ^[A-Za-z_][A-Za-z0-9_]*\*?$ ]] ||
            refuse pass-malformed "APPTRAIN_PASS: $word is not NAME or PREFIX_*:" \
                "give names with blanks between them"
        [[ $word != $never ]] ||
            refuse pass-never \
                "APPTRAIN_PASS: $word never passes: set it in CMD, with env NAME=VALUE"
    done
    names=()
    values=()
    left_out=()
    foreign=()
    # shellcheck disable=SC2053
    for entry in "${_environment[@]}"; do
        name=${entry%%=*}
        value=${entry#*=}
        if [[ -n $obeys_binds && $name == $OF_BINDS ]]; then
            unset "$name" # binds.sh has read it
        elif [[ $name == $FOREIGN ]]; then
            [[ $name == $HARMLESS ]] || foreign+=("$name")
        elif [[ $name == $caches && $name != $kept ]]; then
            replaced+=" $name"
        elif [[ $name == $files && $name != $kept ]] &&
            ! is_shown "$(readlink -f -- "$value")"; then
            unseen+=" $name"
        elif [[ $name == $passed && $name != $never && $name =~ $VALID_NAME ]]; then
            if is_utf8 "$value"; then
                names+=("$name")
                values+=("$value")
            else
                refused+=" $name"
            fi
        elif [[ $name =~ $VALID_NAME && $name != APPTRAIN_* ]]; then
            left_out+=("$name")
        fi
    done
    [[ -z $refused ]] || say_for_node "not passed, the value is not UTF-8:$refused"
    [[ -z $replaced ]] ||
        say_for_job "set to directories on each node's disk:$replaced (APPTRAIN_PASS keeps yours)"
    [[ -z $unseen ]] ||
        say_for_job "not passed, the image does not show their files:$unseen" \
            "(APPTRAIN_BIND shows them)"
    ((${#foreign[@]} == 0)) ||
        say_for_job "not obeyed: ${foreign[*]} (APPTRAIN_BIND and APPTRAIN_PASS are for that)"
}

# give NAME VALUE: hands a variable to CMD. Apptainer takes the prefix off, and with --no-eval no
# shell reads the value.
give() {
    given+=("$1")
    export "${prefix}ENV_$1=$2"
}

# give_default NAME VALUE: hands it to CMD unless that has one of this name.
give_default() {
    if [[ " ${given[*]-} " != *" $1 "* ]]; then
        give "$1" "$2"
    fi
}

# give_known NAME VALUE: hands it to CMD unless the value is empty.
give_known() {
    if [[ -n $2 ]]; then
        give "$1" "$2"
    fi
}

# Sets `given` and `cleared`. A foreign name that bash cannot unset, APPTAINERENV_A-B, would lose
# all variables.
pass_environment() {
    local i user cache=${XDG_CACHE_HOME:-$HOME/.cache}
    given=()
    cleared=()
    for i in ${foreign[@]+"${foreign[@]}"}; do
        if [[ $i =~ $VALID_NAME ]]; then
            unset "$i"
        else
            cleared+=(-u "$i")
        fi
    done
    for ((i = 0; i < ${#names[@]}; i++)); do
        give "${names[i]}" "${values[i]}"
    done
    user=${LOGNAME:-${USER:-$(id -un)}}
    give_default USER "$user" # PBS sets neither in a task
    give_default LOGNAME "$user"
    give_known APPTRAIN_IMAGE_ID "$image_id"
    give_known APPTRAIN_OUTCOME "$outcome"
    give_known LD_LIBRARY_PATH "$compat" # Apptainer adds what --nv brings behind it
    give APPTRAIN_NOT_PASSED "${left_out[*]+${left_out[*]:0:1000}}" # names alone
    give APPTRAIN_PASSED "${names[*]+${names[*]:0:1000}}"
    give TMPDIR "$tmp"
    give PYTHONNOUSERSITE 1
    for i in "${CACHES[@]}"; do
        give_default "$i" "$tmp/${i,,}"
    done
    # They follow XDG_CACHE_HOME, but hold what was downloaded for many runs.
    give_default HF_HOME "$cache/huggingface"
    give_default TORCH_HOME "$cache/torch"
}
