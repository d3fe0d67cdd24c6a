# shellcheck shell=bash disable=SC2034 # containers/run.sh and its parts read the tables
# Which variables of a scheduler tell the host half what it needs on a node. A new scheduler has its
# names here. Sourced by containers/run.sh.
# Sets:  OF_ALLOCATION  patterns of all that tell of the allocation, which pass into the image
#        NODE_RANKS, LOCAL_RANKS, NODE_NAMES, SUBMIT_DIRS, NODE_LISTS, NODE_DISKS
#        answer         first_set: the value that it found

OF_ALLOCATION=('SLURM_*' 'SLURMD_*' 'PBS_*' NCPUS)
# The number of this node in the job.
NODE_RANKS=(SLURM_NODEID PBS_NODENUM APPTRAIN_NODE_RANK)
# The number of this task on its node.
LOCAL_RANKS=(SLURM_LOCALID)
# The node's name, if the scheduler has one of its own for it.
NODE_NAMES=(SLURMD_NODENAME)
# Directories and files that CMD finds where they are on the host.
SUBMIT_DIRS=(SLURM_SUBMIT_DIR PBS_O_WORKDIR)
NODE_LISTS=(PBS_NODEFILE)
# A directory of the job on the node's disk.
NODE_DISKS=(SLURM_TMPDIR)

# first_set NAME...: sets `answer` to the value of the first variable that has one, else to nothing.
first_set() {
    local name
    answer=''
    for name; do
        answer=${!name:-}
        [[ -z $answer ]] || return 0
    done
}
