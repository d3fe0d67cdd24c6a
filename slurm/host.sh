# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # slurm/multinode.sbatch and host/job.sh read and set these
# What the job script must do with Slurm, in the words of host/job.sh, which is sourced before this.
# Reads: SLURM_*, as sbatch, salloc and slurmd set them
#        described             what Slurm says of the job, or of all elements of its array; empty if
#                              it was not asked yet
# Sets:  scheduler, is_batch   as host/job.sh has them
#        broadcasts            how often sbcast was started
#        cluster, facts        describe_job, ask_site
#        runs_in               batch, shell (of salloc or a login node) or step
# shellcheck source=slurm/name.sh
source "$APPTRAIN_HOME/slurm/name.sh"
scheduler=slurm
broadcasts=0
readonly ASKED=120 # s for Slurm to do what it is asked

# Where this script runs: slurmstepd names the batch script and the tasks of steps differently.
# SLURM_STEP_ID does not tell: a job that was submitted from a step has that step's.
runs_in=''
IFS= read -r -d '' runs_in 2>/dev/null <"/proc/$PPID/cmdline" || true
if [[ $runs_in == slurmstepd:*.batch\]* ]]; then
    runs_in='batch'
elif [[ $runs_in == slurmstepd:* && $runs_in != *.interactive\]* ]]; then
    runs_in='step'
elif [[ $runs_in != slurmstepd:* && ${SLURM_TASK_PID:-} == "$$" ]]; then
    runs_in='batch'
else
    runs_in='shell'
fi
is_batch=
if [[ $runs_in == batch ]]; then
    is_batch=yes
fi

describe_job() {
    [[ -n ${SLURM_JOB_ID:-} ]] ||
        refuse slurm-no-job "this is no Slurm job: sbatch slurm/multinode.sbatch," \
            "or salloc and then bash slurm/multinode.sbatch"
    cluster=${SLURM_CLUSTER_NAME:-}
    facts=("runs_in=$runs_in")
}

ask_site() {
    local told='' of_node='' array=${SLURM_ARRAY_TASK_ID:-}
    # Only a batch script is sure to be on the job's first node.
    if [[ -n $is_batch && -n ${SLURMD_NODENAME:-} ]]; then
        exec {of_node}< <(told_of_this_node)
    fi
    if [[ -n $is_batch$array || ${SLURM_RESTART_COUNT:-0} != 0 ]]; then
        told=${described:-}
        if [[ -z $told || -n $array ]]; then
            told=$(told_of_job)
        fi
        facts+=("told=$told")
    fi
    # Those of an array from which this job was submitted.
    if [[ -n $array && $told == *' JobName='* && $told != *' ArrayTaskId='* ]]; then
        unset "${!SLURM_ARRAY_@}"
    fi
    if [[ -n $of_node ]]; then
        told=''
        IFS= read -r -d '' told <&"$of_node" || true
        exec {of_node}<&-
        facts+=("first_node=${told%$'\n'}")
    fi
}

# What was asked of sbatch or salloc, srun takes from variables, also what was asked of a job from
# which this one was submitted. Without them a step has all that the job has. Some contradict the
# words that we give: srun refuses --ntasks-per-node beside SLURM_NTASKS_PER_GPU, and --nodes beside
# SLURM_HOSTFILE. SLURM_THREADS_PER_CORE stays: it says how the job's CPUs are counted. So do names
# like SLURM_MPI_TYPE, which are about how a step runs and not about what it gets.
readonly NOT_FOR_SRUN=(
    # what a task gets
    "SLURM_GPUS*" "SLURM_TRES_*" "SLURM_MEM_PER_*" SLURM_GRES SLURM_CPUS_PER_GPU SRUN_CPUS_PER_TASK
    # how many tasks there are; the words have --ntasks and --ntasks-per-node
    SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_TRES SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_CORE
    # on which nodes, in which order, and bound to what
    SLURM_HOSTFILE "SLURM_DIST*" SLURM_ARBITRARY_NODELIST
    SLURM_GPU_BIND "SLURM_CPU_BIND*" "SLURM_MEM_BIND*"
    # beside which other steps
    "SLURM_STEP*" SLURM_EXACT SLURM_EXCLUSIVE SLURM_OVERLAP
    # what the words say only if it is wanted
    SLURM_NO_KILL SLURM_SRUN_MULTI
)

# Leaves only the job's own variables.
unset_requests() {
    local IFS='|' name requests
    requests="@(${NOT_FOR_SRUN[*]})"
    for name in "${!SLURM_@}" "${!SRUN_@}"; do
        # shellcheck disable=SC2053 # a pattern
        if [[ $name == $requests ]]; then
            unset "$name"
        fi
    done
}

# To srun; TERM would kill the tasks.
interrupt() {
    end_process INT "$1"
}

# Not the environment's SLURM_JOB_END_TIME: limits are changed, and preemption ends a job earlier.
job_end() {
    local at
    at=$(
        SLURM_TIME_FORMAT=standard timeout 5 \
            squeue --noheader --format=%e --jobs="$(own_name)" 2>/dev/null
    ) || true
    [[ $at != 2* ]] || date -d "$at" +%s
}

# If Slurm has begun to run it again by itself, it refuses, and that is as well.
run_again() {
    local why
    if why=$(shielded "$ASKED" scontrol requeue "$(own_name)" 2>&1); then
        return
    fi
    [[ $why != *'pending execution'* ]] || return 0
    printf '%s' "$why"
    return 1
}

# Prints what Slurm says of this node, which is the job's first for a batch script; nothing if it
# does not answer, like told_of_job.
told_of_this_node() {
    timeout 5 scontrol --oneliner show node "$SLURMD_NODENAME" 2>/dev/null || true
}

# Prints nothing if it does not answer.
told_of_job() {
    SLURM_TIME_FORMAT=standard timeout 5 \
        scontrol --oneliner show job "$(own_name)" 2>/dev/null || true
}

# on_nodes WHAT [WORD...]: see host/staging.sh.
on_nodes() {
    await "$asked_to_end" step_on_nodes /bin/bash "$APPTRAIN_HOME/host/stage.sh" "$1" - "$stage" \
        "${@:2}"
}

step_on_nodes() {
    unset_requests
    unset SLURM_LABELIO SLURM_STDOUTMODE # its lines are read here
    exec timeout --foreground --signal=INT --kill-after=10 "$bound" srun "${each_node[@]}" "$@" \
        2>"$handover_dir/said"
}

# copy_to NAME...: Slurm's own tree. If nodes have failed, once more without these.
copy_to() {
    local name names=() failed began bound=$REMOVE
    if ! type -P sbcast >/dev/null; then
        copy_error="there is no sbcast in PATH"
        copy_failed=''
        return
    fi
    read_clock
    began=$seconds
    if broadcast "$@"; then
        return
    fi
    copy_error="sbcast ended with status $status: $said"
    read_clock
    if ((seconds - began >= COPY)); then # `timeout` has ended it
        copy_error="sbcast took more than $COPY s"
    fi
    failed=$(sed -n 's/.*REQUEST_FILE_BCAST(\([^)]*\)).*/\1/p' "$handover_dir/said")
    for name; do
        if [[ $'\n'$failed$'\n' != *$'\n'"$name"$'\n'* ]]; then
            names+=("$name")
        fi
    done
    if ((${#names[@]} && ${#names[@]} < $#)) && [[ -z $asked_to_end ]]; then
        on_nodes clear "$failed" >/dev/null || true # there is not room for two
        if broadcast "${names[@]}"; then
            copy_error=''
        fi
    fi
}

# broadcast NAME...: sets `status` and `said`. Each time to another name, for sbcast adds to what an
# earlier one that failed has left, also with --force; host/stage.sh takes the one that is whole.
broadcast() {
    local nodes=() file=$stage/image.sif.$((++broadcasts))
    if (($# < ${#hosts[@]})) || [[ " ${facts[*]} " == *' left_out='* ]]; then
        nodes=("--nodelist=$(IFS=,; printf '%s' "$*")")
    fi
    await "$asked_to_end" write_said env -u SBCAST_EXCLUDE -u SBCAST_SEND_LIBS \
        timeout --kill-after=10 "$COPY" \
        sbcast ${nodes[@]+"${nodes[@]}"} "$APPTRAIN_IMAGE" "$file"
    said=$(tail -c 400 -- "$handover_dir/said" | tr '\n' ' ')
    said=${said% }
    ((status == 0))
}
