# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# The node's NVIDIA driver, and CUDA's forward compatibility for an older one. Sourced by
# containers/run.sh.
# Reads: device   cpu if no GPU is expected
# Sets:  nv       --nv if there is a driver, else empty
#        compat   the directory of CUDA's forward compatibility, else empty

# Sets `nv` if there is a driver: --nv without one says nothing.
find_gpus() {
    local granted=${CUDA_VISIBLE_DEVICES:-}
    nv=
    if [[ -e /proc/driver/nvidia/version ]]; then
        nv=--nv
    elif [[ -n $granted && $granted != @(-1|NoDevFiles)* && $device != cpu ]]; then
        say_for_node "GPUs were granted (CUDA_VISIBLE_DEVICES=$granted), but this node has no" \
            "NVIDIA driver (/proc/driver/nvidia/version): CMD will see none"
    fi
}

# Sets `compat`, where CUDA's forward compatibility lies. Its libcuda serves an older driver, but no
# node without one.
find_compat() {
    local asked=${APPTRAIN_CUDA_COMPAT:-}
    compat=
    [[ -n $asked ]] || return 0
    if [[ -z $nv ]]; then
        say_for_node "APPTRAIN_CUDA_COMPAT=$asked is not used: no NVIDIA driver here"
        return
    fi
    [[ -d $asked && -x $asked ]] ||
        refuse cuda-compat-missing \
            "APPTRAIN_CUDA_COMPAT=$asked is no directory on this node: $SHARED"
    compat=$(readlink -f -- "$asked")
    [[ $compat != *[:\;]* ]] ||
        refuse cuda-compat-colon \
            "APPTRAIN_CUDA_COMPAT=$asked has a colon or semicolon, which LD_LIBRARY_PATH" \
            "cannot hold: rename it"
    [[ -r $compat/libcuda.so.1 ]] ||
        refuse cuda-compat-no-library \
            "APPTRAIN_CUDA_COMPAT=$asked has no libcuda.so.1 that may be read: give the" \
            "directory that the package cuda-compat made, such as /usr/local/cuda-13.2/compat"
}
