# shellcheck shell=bash
# By which name Slurm's programs mean this job alone. Sourced by slurm/host.sh and
# slurm/survivor.sh.
# Reads: SLURM_JOB_ID, SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID

# Prints the name. An array's last element has the number of the array, which means all elements: a
# requeue of that number runs them all again, also those that have ended. A job that was submitted
# from such an element has its variables, but a number of its own.
own_name() {
    if [[ $SLURM_JOB_ID == "${SLURM_ARRAY_JOB_ID:-}" ]]; then
        printf '%s_%s' "$SLURM_JOB_ID" "${SLURM_ARRAY_TASK_ID:-}"
    else
        printf '%s' "$SLURM_JOB_ID"
    fi
}
