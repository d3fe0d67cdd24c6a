# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # pbs/multinode.pbs and containers/job.sh read and set these
# What the job script must know of PBS, in the words of containers/job.sh, which is sourced before this.
# Reads: PBS_*, as PBS sets them for a job script, and what qstat -f says of the job
#
# pbsdsh runs one task for each line of the node file, a task starts with nearly no environment, and the job's output
# stays in a spool until its end: so each host gets one task, by the index of its first line, what it needs through
# files of the run directory, and a log there, which this script follows.
scheduler=pbs
# shellcheck source=pbs/starters.sh
source "$APPTRAIN_HOME/pbs/starters.sh"

readonly STOP_BEFORE=300  # s before the end of the walltime, and at most a tenth of it
readonly ANSWER=${APPTRAIN_ANSWER_TIMEOUT:-120} # s for a task to say that it has started
readonly QSTAT=30         # s for an answer of the server
readonly KILL_DELAY=10    # s from SIGTERM to SIGKILL where a queue sets none
readonly TO_CONCLUDE=5    # s of these for what follows the ranks' end, but at most a fifth

if [[ ${PBS_ENVIRONMENT:-} == PBS_BATCH && ${PBS_TASKNUM:-} == 1 ]]; then is_batch=yes; else is_batch=; fi

# PBS starts a script in HOME; paths are meant as at qsub.
if [[ -n $is_batch && -d ${PBS_O_WORKDIR:-} ]]; then cd -- "$PBS_O_WORKDIR" || exit; fi

# A job of a chain takes up where the one that submitted it stopped.
carried=
if [[ -n ${APPTRAIN_CHAIN_FILE:-} ]]; then
    while IFS= read -r -d '' word; do export "${word?}" && carried+=,${word%%=*}=; done <"$APPTRAIN_CHAIN_FILE"
    unset APPTRAIN_CHAIN_FILE word
fi
own_bind=${APPTRAIN_BIND:-} own_pass=${APPTRAIN_PASS:-} # before the profile's are added

describe_job() {
    [[ $ANSWER =~ ^[0-9]{1,7}$ ]] || refuse "APPTRAIN_ANSWER_TIMEOUT=$ANSWER: must be seconds: leave it out for 120"
    [[ ${APPTRAIN_START:-ssh} == @(pbsdsh|pbs_tmrsh|mpiexec|ssh) ]] ||
        refuse "--start $APPTRAIN_START: must be one of pbsdsh, pbs_tmrsh, mpiexec, ssh"
    # Slurm's own qsub sets some of PBS's variables, but not this one.
    [[ -z ${SLURM_JOB_ID:-} || -n ${PBS_ENVIRONMENT:-} ]] ||
        refuse "this is a job of Slurm, even where its qsub has started it: sbatch (or that qsub) slurm/multinode.sbatch, in salloc bash slurm/multinode.sbatch"
    if [[ -z ${PBS_JOBID:-} ]]; then
        describe_hosts
    else
        [[ ${PBS_TASKNUM:-1} == 1 ]] || refuse "job $PBS_JOBID: this is a task: start this script once, not with pbsdsh"
        job_id=$PBS_JOBID job_name=${PBS_JOBNAME:-job} submit_dir=${PBS_O_WORKDIR:-$PWD}
        cluster=${PBS_JOBID#*.} run_id=${PBS_JOBID%%.*}
        if [[ $cluster == "$PBS_JOBID" ]]; then cluster=; fi
        run_id=${run_id/\[/_} run_id=${run_id/\]/}
        [[ -r ${PBS_NODEFILE:-} ]] ||
            refuse "PBS_NODEFILE=${PBS_NODEFILE:-} cannot be read: it lists the job's hosts: unset it if you set it yourself"
        read_nodefile
        ask_server
        find_gpus
        find_grace
    fi
    tasks=1 nnodes=${#hosts[@]}
    nodelist=$(IFS=, && printf '%s' "${hosts[*]:0:8}")
    if ((nnodes > 8)); then nodelist+=,...; fi
    find_walltime
    find_end
}

# Sets `hosts`, each once, and `lines`, the index of the line on which each first stands.
read_nodefile() {
    local host at=0
    local -A seen=()
    hosts=() lines=()
    while IFS= read -r host || [[ -n $host ]]; do
        host=${host//[[:space:]]/}
        if [[ -n $host ]]; then
            if [[ -z ${seen[$host]:-} ]]; then hosts+=("$host") lines+=("$at"); fi
            seen[$host]=yes at=$((at + 1))
        fi
    done <"$PBS_NODEFILE"
    ((at > 0)) || refuse "PBS_NODEFILE=$PBS_NODEFILE has no host in it: ask the administrator"
    chunk_lines=$at
}

# The hosts of --nodes, where there is no scheduler.
describe_hosts() {
    local i word names=${APPTRAIN_NODES:-}
    for ((i = 0; i < ${#arguments[@]}; i++)); do
        word=${arguments[i]}
        case $word in
            --) break ;;
            --nodes=*) names=${word#*=} ;;
            --nodes) names=${arguments[i + 1]:-} ;;
        esac
    done
    [[ -n $names ]] || refuse "this is no PBS job: qsub pbs/multinode.pbs, or give --start ssh and --nodes a,b"
    [[ ${APPTRAIN_START:-} == @(ssh|mpiexec) ]] ||
        refuse "there is no PBS job whose tasks ${APPTRAIN_START:-pbsdsh} could start: give --start ssh (or mpiexec) with --nodes"
    [[ $names != *[][[:space:]]* ]] || refuse "--nodes $names: give the names with commas between them"
    IFS=, read -r -a hosts <<<"$names"
    export APPTRAIN_NODES=$names
    job_id=manual job_name=apptrain submit_dir=$PWD cluster='' run_id=$(date +%Y%m%d-%H%M%S)-$$ lines=() told=''
}

# Sets `told`, what qstat -f says, a line for each attribute; empty where the server does not answer.
ask_server() {
    told=$(timeout "$QSTAT" qstat -f "$PBS_JOBID" 2>/dev/null) || told=''
    told=${told//$'\n\t'/}
    if [[ -z $told ]]; then say "qstat -f $PBS_JOBID does not answer: walltime and GPUs are unknown"; fi
}

# An attribute of the job; empty where it has none of that name.
attribute() {
    local line
    while IFS= read -r line; do
        line=${line#"${line%%[![:blank:]]*}"}
        if [[ $line == "$1 = "* ]]; then
            printf '%s' "${line#"$1 = "}"
            return
        fi
    done <<<"$told"
}

# Sets APPTRAIN_NGPUS, how many GPUs each host has for us; left out where the request does not say.
find_gpus() {
    local host chunk i granted='' listed='' visible=${CUDA_VISIBLE_DEVICES:-}
    local -A sum=()
    local -a places chunks
    IFS=+ read -r -a places <<<"$(attribute exec_host)"
    # A chunk may span vnodes, with a + between them: (a[0]:ngpus=2+a[1]:ngpus=2)+(b[0]:ngpus=4)
    mapfile -t chunks <<<"$(attribute exec_vnode | sed 's/)+(/\n/g')"
    for ((i = 0; i < ${#places[@]}; i++)); do
        host=${places[i]%%/*} chunk=${chunks[i]:-}
        while [[ $chunk =~ :ngpus=([0-9]+) ]]; do
            sum[$host]=$((${sum[$host]:-0} + BASH_REMATCH[1])) chunk=${chunk#*"${BASH_REMATCH[0]}"}
        done
    done
    if ((chunk_lines > ${#hosts[@]} && ${#places[@]} > ${#hosts[@]})); then
        say "${#places[@]} chunks share $( ((${#hosts[@]} == 1)) && echo 'one host' || echo "${#hosts[@]} hosts"), as they may without -l place=scatter: each host gets one task, with the GPUs of all its chunks"
    fi
    if [[ -n $(attribute Resource_List.ngpus) ]]; then
        for host in "${hosts[@]}"; do listed+=" ${sum[$host]:-0} on $host"; done
        granted=${sum[${hosts[0]}]:-0}
        for host in "${hosts[@]}"; do
            [[ ${sum[$host]:-0} == "$granted" ]] ||
                refuse "PBS granted GPUs unevenly ($(printf '%s' "${listed# }" | sed 's/ \([0-9]* on\)/, \1/g')): every host needs the same number: one chunk a host (-l place=scatter), all alike"
        done
        [[ -z ${APPTRAIN_NGPUS:-} || $APPTRAIN_NGPUS == "$granted" ]] ||
            refuse "APPTRAIN_NGPUS=$APPTRAIN_NGPUS, but PBS granted $granted GPUs on each host: leave it out"
        [[ -z $visible || $(tr ',' '\n' <<<"$visible" | wc -l) == "$granted" ]] ||
            refuse "CUDA_VISIBLE_DEVICES=$visible names other than the $granted GPUs that PBS granted on each host: leave it out"
        export APPTRAIN_NGPUS=$granted
    fi
}

# Sets APPTRAIN_TERM_GRACE, how long ranks may save once the job was deleted, unless it is set. What follows needs no
# more than a second where the nodes are well, and should it be cut off, keep.sh cleans up and PBS has the status
# anyway; so of PBS's own short delay, the ranks get most: SIGKILL never came before it was over, but up to 12 s later.
find_grace() {
    local told delay=$KILL_DELAY rest
    told=$(timeout "$QSTAT" qstat -Q -f "${PBS_QUEUE:-workq}" 2>/dev/null) || told=''
    told=$(attribute kill_delay)
    if [[ $told =~ ^[0-9]{1,6}$ ]]; then delay=$told; fi
    rest=$((delay / 5 < TO_CONCLUDE ? delay / 5 : TO_CONCLUDE))
    if [[ -z ${APPTRAIN_TERM_GRACE:-} ]]; then export APPTRAIN_TERM_GRACE=$((delay > 1 ? delay - (rest ? rest : 1) : 1)); fi
}

# Where the request names no GPUs, a site's whole nodes come with theirs.
use_site_gpus() {
    if [[ -n ${PBS_JOBID:-} && -n ${site_gpus:-} && -z ${APPTRAIN_NGPUS:-} ]]; then export APPTRAIN_NGPUS=$site_gpus; fi
}

# Sets `walltime`, in seconds; 0 where it is unknown.
find_walltime() {
    local part text
    walltime=0
    text=$(attribute Resource_List.walltime)
    if [[ $text =~ ^([0-9]+:)*[0-9]+$ ]]; then
        while IFS= read -r -d : part; do walltime=$((walltime * 60 + 10#$part)); done <<<"$text:"
    fi
    [[ ${APPTRAIN_STOP_BEFORE:-0} =~ ^[0-9]{1,7}$ ]] ||
        refuse "--stop-before $APPTRAIN_STOP_BEFORE: must be seconds; 0 leaves it out"
    ((walltime == 0 || ${APPTRAIN_STOP_BEFORE:-0} < walltime)) ||
        refuse "--stop-before $APPTRAIN_STOP_BEFORE, but the walltime is $walltime s: give less, or request more"
}

# Sets the values of SECONDS at which the ranks are asked to stop (`ends`) and the walltime ends (`last`); empty for
# never.
find_end() {
    local before=${APPTRAIN_STOP_BEFORE:-} started now
    ends='' last=''
    if ((walltime == 0)) || [[ $before == 0 ]]; then return; fi
    before=${before:-$((walltime / 10 < STOP_BEFORE ? walltime / 10 : STOP_BEFORE))}
    last=$walltime
    # Before this script, a prologue may have taken some of it.
    if started=$(date -d "$(attribute stime)" +%s 2>/dev/null) && now=$(($(date +%s) - SECONDS)) &&
        ((now > started && now - started < walltime)); then
        last=$((walltime - now + started))
    fi
    ends=$((last - before))
}

job_end() { if [[ -n ${last:-} ]]; then echo "$(($(date +%s) - SECONDS + last))"; fi; }

node_names() { printf '%s\n' "${hosts[@]}"; }

# TERM reaches tasks of the first host only, and none where they were not started by PBS.
end() {
    asked=$1
    if [[ $1 == 143 ]]; then cut_short; fi # the others do so themselves, and a second one would end ranks that save
}

# Has the first node's entrypoint end, which tells all others; where it is not there (any more), all that are.
interrupt() {
    local name='' pid=''
    if { read -r name pid _; } 2>/dev/null <"$run_dir/tasks/$attempt.0" && [[ $name == "$(uname -n)" ]] &&
        kill -TERM "$pid" 2>/dev/null; then
        return
    fi
    (umask 077 && mkdir -p -- "$run_dir/tasks" && touch -- "$run_dir/tasks/$attempt.end")
}

# Nothing is known of either.
is_requeued() { false; }
is_preempted() { false; }

# Submits this script once more, for the same run directory, with what this job asked for.
run_again() {
    local left=${APPTRAIN_CHAIN:-0} file=$run_dir/chain line name value options=()
    if [[ ! $left =~ ^[0-9]{1,4}$ ]] || ((left == 0)); then
        echo "APPTRAIN_CHAIN, how many jobs may follow, is ${APPTRAIN_CHAIN:-not set}"
        return 1
    elif [[ -n ${PBS_ARRAY_INDEX:-} ]]; then
        echo "an element of a job array cannot be submitted by itself"
        return 1
    fi
    write_chain "$file" "$((left - 1))"
    while IFS= read -r line; do
        line=${line#"${line%%[![:blank:]]*}"}
        name=${line%% = *} value=${line#* = }
        case $name in
            Resource_List.*)
                if [[ ${name#*.} != @(ncpus|ngpus|mem|nodect|nodes|mpiprocs) ]]; then options+=(-l "${name#*.}=$value"); fi
                ;; # those follow from select
            queue) options+=(-q "${PBS_O_QUEUE:-$value}") ;; # which may route to this one, and alone take jobs
            project) if [[ $value != _pbs_project_default ]]; then options+=(-P "$value"); fi ;;
            Account_Name) options+=(-A "$value") ;;
            sandbox | group_list) options+=(-W "$name=$value") ;;
        esac
    done <<<"$told"
    # The values from the environment: commas and quotes of one that stands in -v itself would be taken for qsub's.
    cd -- "$submit_dir" &&
        APPTRAIN_CHAIN_FILE=$file.env timeout -s KILL "$QSTAT" qsub -N "$job_name" ${options[@]+"${options[@]}"} -v APPTRAIN_HOME,APPTRAIN_CHAIN_FILE "$0" >>"$file.jobs"
}

# The next job's arguments, our variables, and those of this job's own qsub -v, which may hold what -v cannot.
write_chain() (
    umask 077
    export APPTRAIN_CHAIN=$2 APPTRAIN_BIND=$own_bind APPTRAIN_PASS=$own_pass
    for name in START STOP_BEFORE ON_FAILURE; do # which may have come as options
        name=APPTRAIN_$name
        if [[ -n ${!name:-} ]]; then export "${name?}"; fi
    done
    unset APPTRAIN_ATTEMPT APPTRAIN_NGPUS APPTRAIN_NODEFILE
    if ((${#arguments[@]})); then
        printf '%s\0' "${arguments[@]}" >"$1.args"
        export APPTRAIN_ARGS_FILE=$1.args
    fi
    while IFS= read -r -d '' entry; do
        name=${entry%%=*}
        if [[ $name == APPTRAIN_* || ($name != PBS_* && ,$(attribute Variable_List)$carried == *",$name="*) ]]; then
            printf '%s\0' "$entry"
        fi
    done < <(env -0) >"$1.env"
)
