# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# Apptainer and the image on this node: whether that program can run it, and how it comes to be mounted. Sourced by
# containers/run.sh. Nothing else here knows Apptainer's versions, or what a SIF file looks like.

readonly UNPACKED=2  # times its packed size; measured: 1.7

# Sets `apptainer`, its `package`, `version` and `libexec`, the `prefix` of its variables, and `setuid`.
find_apptainer() {
    local name value least=1.2
    if [[ -n ${APPTRAIN_APPTAINER:-} ]]; then
        apptainer=$(type -P -- "$APPTRAIN_APPTAINER") ||
            refuse "APPTRAIN_APPTAINER=$APPTRAIN_APPTAINER is no program here: give apptainer's or singularity's path"
    else
        apptainer=$(type -P apptainer || type -P singularity) ||
            refuse "neither apptainer nor singularity is in PATH: load the site's module, or set APPTRAIN_APPTAINER"
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
        refuse "$apptainer does not say what it is (\`buildcfg\`): set APPTRAIN_APPTAINER to apptainer or singularity"
    if [[ $package == singularity ]]; then least=3.10; fi
    is_at_least "$least" ||
        refuse "$apptainer is $package $version: $least or newer is needed, for --no-eval: load a newer module," \
            "or give another in APPTRAIN_APPTAINER"
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
            refuse "this node allows no user namespaces ($file is 0), and $package here is not setuid:" \
                "ask the administrator to allow them, or for $package-suid"
        fi
    done
}

# Checks IMAGE, and sets `image`, its `kind` (sif, directory), `bytes`, and `image_id`, which every build makes anew.
# Nothing but a file is opened: a fifo would hang.
check_image() {
    local header arch ours size
    image=$(absolute "$1") image_id=
    [[ -e $image ]] || refuse "there is no image $image on this node, or its directory may not be searched:" \
        "make image, give a path that all nodes share, or for a URL the file that apptainer pull makes"
    [[ -r $image ]] || refuse "the image $image may not be read: ask its owner for chmod a+r"
    if [[ -d $image ]]; then
        [[ -d $image/.singularity.d ]] ||
            refuse "$image is a directory, but no unpacked image (it has no .singularity.d): give a SIF file"
        kind=directory
        return
    fi
    [[ -f $image ]] || refuse "the image $image is no file: give a SIF file"
    kind=sif bytes=$(stat -L -c %s -- "$image")
    header=$(od -An -v -tx1 -j32 -N32 -- "$image" 2>/dev/null | tr -d ' \n') || true
    [[ $header == 5349465f4d4147494300* && $bytes -ge 128 ]] ||
        refuse "$image is no SIF file: give one, such as make image makes"
    arch=${header:26:4}
    case $(uname -m) in
        x86_64) ours=3032 ;; aarch64) ours=3034 ;; ppc64le) ours=3036 ;; riscv64) ours=3132 ;; *) ours=$arch ;;
    esac
    [[ $arch == "$ours" || $arch == 3030 ]] ||
        refuse "the image $image is for another kind of processor than this node's $(uname -m): make one on such a node"
    image_id=${header:32:8}-${header:40:4}-${header:44:4}-${header:48:4}-${header:52}
    read -r size header < <(od -An -v -tu8 -j112 -N16 -- "$image") || true
    ((size + header <= bytes)) ||
        refuse "the image $image is cut off: it has $bytes of $((size + header)) bytes: copy or make it again"
}

# Sets `unmounted` to why this node does not mount the image, and `mounters` to where Apptainer looks for the program
# that does; a setuid Apptainer does so in ways of its own.
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
        refuse "this node does not mount the image ($unmounted), and $place, where it would be unpacked, has $free MB" \
            "free of the $need MB needed: give a larger node-local directory in APPTAINER_TMPDIR"
    say_for_node "this node does not mount the image ($unmounted): unpacking it to $place, about $need MB, for this run"
    export "${prefix}_TMPDIR=$place"
    unpack=--unsquash
    if [[ $package == singularity ]]; then unpack=--tmp-sandbox; fi
    if [[ $package == singularity ]] && ! is_at_least 4.1; then unpack=''; fi
}

# Has the process that shows the image outlive signals that are meant for CMD: some schedulers send them to every
# process of a task (Slurm's proctrack/linuxproc), and without its image CMD can save nothing, but dies of SIGBUS. Sets
# `shield`, a directory for PATH; empty where Apptainer mounts in another way, or brings a program of its own along.
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

# Whether the image could not be mounted after all: a kernel that gives FUSE to root alone shows only now.
mount_failed() {
    [[ ! -e $tmp/.started && $status != 0 && -z $signalled && $kind == sif && -z $unmounted ]] || return 1
    unmounted=$("$apptainer" -q exec --cleanenv --no-mount home,cwd,tmp "$image" true 2>&1 >/dev/null) || true
    [[ $unmounted == *"image driver mount failure"* ]] || return 1
    unmounted=${unmounted##*exited: }
}
