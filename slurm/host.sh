# shellcheck shell=bash
# shellcheck disable=SC2034 # slurm/multinode.sbatch and containers/job.sh read what is set here
# What the job script must know of Slurm, in the words of containers/job.sh, which is sourced before this.
# Reads: SLURM_*, as sbatch, salloc and slurmd set them
scheduler=slurm

# Where this script runs: slurmstepd names the batch script and the tasks of steps differently. SLURM_STEP_ID does
# not tell: a job that was submitted from a step has that step's.
case $(tr '\0' ' ' 2>/dev/null <"/proc/$PPID/cmdline") in
    slurmstepd:*.batch\]*) place='batch' ;;
    slurmstepd:*.interactive\]*) place='shell' ;;
    slurmstepd:*) place='step' ;;
    *) if [[ ${SLURM_TASK_PID:-} == "$$" ]]; then place='batch'; else place='shell'; fi ;;
esac
if [[ $place == batch ]]; then is_batch=yes; else is_batch=; fi

describe_job() {
    local total=${SLURM_GPUS:-} name
    [[ -n ${SLURM_JOB_ID:-} ]] ||
        refuse "this is no Slurm job: sbatch slurm/multinode.sbatch, or salloc and then bash slurm/multinode.sbatch"
    [[ $place != step ]] || refuse "job $SLURM_JOB_ID, step ${SLURM_STEP_ID:-}: start this script once, not with srun"
    [[ -z ${SLURM_HET_SIZE:-} ]] ||
        refuse "SLURM_HET_SIZE=$SLURM_HET_SIZE: a heterogeneous job, whose step may leave nodes out: submit one component (no ':' between requests)"
    [[ ${APPTRAIN_START:-srun} == srun ]] || refuse "--start $APPTRAIN_START: under Slurm tasks start with srun: leave it out"
    [[ -z ${APPTRAIN_STOP_BEFORE:-} ]] || refuse "--stop-before $APPTRAIN_STOP_BEFORE: under Slurm it is sbatch --signal=B:USR2@SECONDS"
    job_id=$SLURM_JOB_ID job_name=${SLURM_JOB_NAME:-job} submit_dir=${SLURM_SUBMIT_DIR:-$PWD}
    cluster=${SLURM_CLUSTER_NAME:-} run_id=$SLURM_JOB_ID
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then run_id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    for name in SLURM_JOB_NUM_NODES SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_RESTART_COUNT; do # bash would run what stands in them
        [[ ${!name:-1} =~ ^[0-9]{1,9}$ ]] || refuse "$name=${!name}: must be a number: unset it if you set it yourself"
    done
    if [[ ${SLURM_RESTART_COUNT:-0} != 0 ]]; then ran_before=yes; fi
    nodelist=$SLURM_JOB_NODELIST nnodes=$SLURM_JOB_NUM_NODES
    tasks=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-nnodes} / nnodes))}
    ((${SLURM_NTASKS:-nnodes * tasks} == nnodes * tasks && tasks > 0)) ||
        refuse "$SLURM_NTASKS tasks on $nnodes nodes (${SLURM_TASKS_PER_NODE:-}): every node needs the same number: --ntasks-per-node=1, or one for each rank"
    cpus=${SLURM_CPUS_PER_TASK:-$(($(least "$SLURM_JOB_CPUS_PER_NODE") / tasks))}
    # Each rank its own cores; a torchrun all of the job's, for its ranks to share.
    if ((tasks > 1)); then cpu_bind=cores; else cpu_bind=none; fi
    gpus=${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}${SLURM_GPUS_PER_NODE:-}
    if [[ ${SLURM_GPUS_PER_NODE:-0} == 0 && ${total##*:} =~ ^[0-9]+$ && ${SLURM_GPUS_ON_NODE:-} =~ ^[0-9]+$ ]]; then
        ((SLURM_GPUS_ON_NODE * nnodes == ${total##*:})) ||
            refuse "SLURM_GPUS=$total on $nnodes nodes, but $SLURM_GPUS_ON_NODE on the first: every node needs the same number: request --gpus-per-node rather than --gpus"
    fi
    restarts=${SLURM_RESTART_COUNT:-0} # which may be that of a job from which this one was submitted
    if [[ $restarts != 0 && $(told_of_job) =~ \ Restarts=([0-9]{1,9})\  ]]; then restarts=${BASH_REMATCH[1]}; fi
    if [[ $place == shell && -n ${SLURM_STEP_ID:-} ]]; then overlap=yes; else overlap=; fi # the shell's step holds all
}

node_names() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }

# What was asked of sbatch or salloc, srun takes from variables, also what was asked of a job from which this one
# was submitted. Without them a step has all that the job has.
only_the_jobs_own() {
    unset "${!SLURM_GPUS@}" "${!SLURM_TRES_@}" "${!SLURM_MEM_PER_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" \
        "${!SLURM_STEP@}" SLURM_GRES SLURM_GPU_BIND SLURM_DISTRIBUTION SLURM_EXACT SLURM_EXCLUSIVE
}

interrupt() { kill -INT "$1"; } # to srun; TERM would kill the tasks

# Not the environment's SLURM_JOB_END_TIME: limits are changed, and preemption ends a job earlier.
job_end() {
    local at
    at=$(timeout 5 squeue --noheader --format=%e --jobs="$SLURM_JOB_ID" 2>/dev/null) && [[ $at == 2* ]] && date -d "$at" +%s || true
}

run_again() { scontrol requeue "$SLURM_JOB_ID" || is_requeued; }

# What Slurm says of the job; nothing where it does not answer.
told_of_job() { timeout 5 scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null || true; }

# A job that it ends with a view to another run already counts as that.
is_requeued() { [[ $(told_of_job) =~ \ Restarts=([0-9]{1,9})\  ]] && ((BASH_REMATCH[1] > restarts)); }

# It sends the tasks TERM when the grace time begins, and this script nothing.
is_preempted() { [[ $(told_of_job) =~ \ PreemptTime=[0-9] ]]; }
