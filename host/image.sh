# shellcheck shell=bash disable=SC2034,SC2154 # containers/run.sh reads and sets some
# Apptainer and the image on this node: whether that program can run it, and how it comes to be
# mounted. Sourced by containers/run.sh. Nothing else here knows Apptainer's versions, or what a SIF
# file looks like.
# Reads: status, signalled, run_at   how the start ended, and when it began
#        options                     of `apptainer exec`, as a profile says
#        tmp, SHARED
#        known, tell                 what --known and --tell say
# Sets:  apptainer    ask_apptainer: the program
#        identity     ask_apptainer: what it has in common with the same program elsewhere alone;
#                     empty if that cannot be seen
#        configuration   ask_apptainer: a file descriptor; empty if `known` is about this program
#        known        read_configuration: IDENTITY NAME VERSION LIBEXECDIR; empty if it says nothing
#        package, version, libexec   find_apptainer: what it is
#        prefix       find_apptainer: of the variables that it reads
#        setuid       find_apptainer: yes if it is
#        userns       find_apptainer: the option without which it would ask for the setuid bit of a
#                     starter that has none
#        image, kind (sif, directory), bytes, image_id (which every build makes anew)   check_image
#        answer       sif_architecture: the code
#        unmounted    why this node does not mount the image; empty if it does
#        mounter      find_mount: the program with which Apptainer mounts it
#        unpack       choose_unpacking: the option that unpacks the image
#        shield       shield_mount: a directory for PATH
#        mount_tried  mount_failed: yes once it has tried
#        again        mount_failed: yes if the mount may work now

# s: a start that failed later may have waited for the mount; Apptainer does so for 10.
readonly MOUNT_LIMIT=9
# s for a mount that is only tried.
readonly MOUNT_BOUND=60
# s for Apptainer to say what it is.
readonly BUILDCFG=60
# Bytes: less may be a site's script, which starts another program on each node.
readonly PROGRAM=1000000
# Times its packed size; measured: 1.7.
readonly UNPACKED=2

# Sets `apptainer` and `configuration`, from which find_apptainer reads what it says of itself, and
# which it closes: that takes a while, in which this script goes on. After a refusal it ends alone.
# The job script asks once: a node that has the same program takes the answer, `known`.
ask_apptainer() {
    if [[ -n ${APPTRAIN_APPTAINER:-} ]]; then
        apptainer=$(type -P -- "$APPTRAIN_APPTAINER") ||
            refuse apptainer-not-a-program \
                "APPTRAIN_APPTAINER=$APPTRAIN_APPTAINER is no program here:" \
                "give apptainer's or singularity's path"
    else
        apptainer=$(type -P apptainer || type -P singularity) ||
            refuse apptainer-missing "neither apptainer nor singularity is in PATH:" \
                "load the site's module, or set APPTRAIN_APPTAINER"
    fi
    identity=$(stat -L -c %s:%Y -- "$apptainer") # its bytes, and when it was made
    if ((${identity%:*} < PROGRAM)); then
        identity=''
    fi
    configuration=''
    if [[ -z $identity || $known != "$identity "* ]]; then
        exec {configuration}< <(timeout "$BUILDCFG" "$apptainer" buildcfg 2>/dev/null)
    fi
}

# Sets `known`, and leaves it in the file `tell`.
read_configuration() {
    local name value called='' version='' libexec=''
    while IFS='=' read -r name value; do
        case $name in
            PACKAGE_NAME) called=$value ;;
            PACKAGE_VERSION) version=$value ;;
            LIBEXECDIR) libexec=$value ;;
        esac
    done <&"$configuration"
    exec {configuration}<&-
    known=${called:+"$identity $called $version $libexec"}
    if [[ -n $tell && -n $identity ]]; then
        printf '%s' "$known" 2>/dev/null >"$tell" || rm -f -- "$tell" # the disk is full: nodes ask
    fi
}

# Sets `package`, `version`, `libexec`, `prefix`, `setuid` and `userns`. A build of SingularityCE or
# SingularityPRO has its edition in its name.
find_apptainer() {
    local called rest least=1.2
    setuid=''
    userns=''
    [[ -z $configuration ]] || read_configuration
    rest=${known#* }
    called=${rest%% *}
    package=${called%%-*}
    rest=${rest#* }
    version=${rest%% *}
    libexec=${rest#* }
    [[ -n $package ]] ||
        refuse apptainer-unknown "$apptainer does not say what it is (\`buildcfg\`):" \
            "set APPTRAIN_APPTAINER to apptainer or singularity"
    [[ $package == @(apptainer|singularity) ]] ||
        refuse apptainer-unknown "$apptainer says that it is $called (\`buildcfg\`):" \
            "set APPTRAIN_APPTAINER to apptainer or singularity"
    if [[ $package == singularity ]]; then
        least=3.10
    fi
    is_at_least "$least" ||
        refuse apptainer-too-old \
            "$apptainer is $called $version: $least or newer is needed, for --no-eval:" \
            "load a newer module, or give another in APPTRAIN_APPTAINER"
    libexec+=/$package/bin
    prefix=${package^^}
    if [[ -u $libexec/starter-suid ]]; then
        setuid=yes
    elif [[ -e $libexec/starter-suid && " ${options[*]-} " != *' --'@(userns|fakeroot)' '* ]] &&
        ((EUID)); then
        userns=--userns
    fi
}

# Whether Apptainer's version is this one, MAJOR.MINOR, or newer.
is_at_least() {
    [[ $version =~ ^([0-9]+)\.([0-9]+) ]] || return 1
    ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= ${1%.*} * 1000 + ${1#*.}))
}

check_user_namespaces() {
    local file
    if [[ -n $setuid ]] || ((EUID == 0)); then
        return
    fi
    for file in /proc/sys/user/max_user_namespaces /proc/sys/kernel/unprivileged_userns_clone; do
        if [[ -r $file && $(<"$file") == 0 ]]; then
            refuse no-user-namespaces "this node allows no user namespaces ($file is 0)," \
                "and $package here is not setuid:" \
                "ask the administrator to allow them, or for $package-suid"
        fi
    done
}

# check_image IMAGE: sets `image`, `kind`, `bytes` and `image_id`. Nothing but a file is opened: a
# fifo would hang.
check_image() {
    local header arch at size
    image=$1
    make_absolute image
    image_id=
    [[ -e $image ]] ||
        refuse image-missing \
            "there is no image $image on this node, or its directory may not be searched:" \
            "correct the path (all nodes must share it), give another in APPTRAIN_IMAGE, or build" \
            "one (make image); for a URL give the file that apptainer pull makes"
    [[ -r $image ]] ||
        refuse image-unreadable "the image $image may not be read: ask its owner for chmod a+r"
    if [[ -d $image ]]; then
        [[ -d $image/.singularity.d ]] ||
            refuse image-not-unpacked \
                "$image is a directory, but no unpacked image (it has no .singularity.d):" \
                "give a SIF file"
        kind=directory
        return
    fi
    [[ -f $image ]] || refuse image-no-regular-file "the image $image is no file: give a SIF file"
    kind=sif
    bytes=$(stat -L -c %s -- "$image")
    { header=$(od -An -v -tx1 -N128 -- "$image") || true; } 2>/dev/null
    header=${header//[[:space:]]/} # two digits a byte
    [[ ${header:64:20} == 5349465f4d4147494300 && ${#header} == 256 ]] ||
        refuse image-not-sif "$image is no SIF file: give one, such as make image makes"
    arch=${header:90:4}
    sif_architecture "$arch"
    [[ $arch == "$answer" || $arch == 3030 ]] ||
        refuse image-other-processor \
            "the image $image is for another kind of processor$(sif_processor "$arch")" \
            "than this node's $(uname -m): take one for it, or make one on such a node"
    image_id=${header:96:8}-${header:104:4}-${header:108:4}-${header:112:4}-${header:116:12}
    read_number "${header:224:16}"
    at=$number
    read_number "${header:240:16}"
    size=$((at + number))
    ((size <= bytes)) ||
        refuse image-cut-off "the image $image is cut off: it has $bytes of $size bytes:" \
            "copy or make it again"
}

# Sets `number`, of which these are the digits, two a byte and the lowest byte first.
read_number() {
    local digits='' i
    for ((i = 0; i < ${#1}; i += 2)); do
        digits=${1:i:2}$digits
    done
    number=$((16#$digits))
}

# sif_processor ARCH: prints the processor that a SIF file names so, if it is a usual one.
sif_processor() {
    case $1 in
        3032) printf ' (x86_64)' ;;
        3034) printf ' (aarch64)' ;;
    esac
}

# sif_architecture OTHERWISE: sets `answer` to how a SIF file names this node's processor; to
# OTHERWISE if that is not known.
sif_architecture() {
    case $(uname -m) in
        x86_64) answer=3032 ;;
        aarch64) answer=3034 ;;
        ppc64le) answer=3036 ;;
        riscv64) answer=3132 ;;
        *) answer=$1 ;;
    esac
}

# Sets `unmounted` and `mounter`. A setuid Apptainer mounts in ways of its own.
find_mount() {
    local places="$libexec:$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    unmounted=
    [[ ${APPTRAIN_UNPACK:-0} == [01] ]] ||
        refuse unpack-value "APPTRAIN_UNPACK=$APPTRAIN_UNPACK: must be 1 or 0"
    if [[ $kind == directory ]]; then
        return
    elif [[ ${APPTRAIN_UNPACK:-0} == 1 ]]; then
        unmounted="APPTRAIN_UNPACK=1"
    elif [[ -n $setuid ]]; then
        return
    elif ! mounter=$(PATH=$places type -P squashfuse_ll || PATH=$places type -P squashfuse); then
        unmounted="it has no squashfuse"
    elif [[ ! -r /dev/fuse || ! -w /dev/fuse ]]; then
        unmounted="/dev/fuse may not be opened"
    elif [[ $package == singularity ]] && ! is_at_least 4.1; then
        unmounted="singularity $version mounts only where it is setuid"
    fi
}

# Sets `unpack`, after a check for room.
choose_unpacking() {
    local place need free
    place=${APPTAINER_TMPDIR:-${SINGULARITY_TMPDIR:-$tmp}}
    [[ -d $place && -w $place ]] ||
        refuse apptainer-tmpdir \
            "APPTAINER_TMPDIR $place is no directory that may be written: $SHARED"
    need=$((bytes * UNPACKED / 1000000 + 1))
    find_free "$place"
    ((free >= need)) ||
        refuse unpack-no-room \
            "this node does not mount the image ($unmounted), and $place, where it would be" \
            "unpacked, has $free MB free of the $need MB needed:" \
            "give a larger node-local directory in APPTAINER_TMPDIR"
    say_for_node "this node does not mount the image ($unmounted):" \
        "unpacking it to $place, about $need MB, for this run" \
        ${mount_tried:+"(APPTRAIN_UNPACK=1 does so without trying)"}
    export "${prefix}_TMPDIR=$place"
    if [[ $package == apptainer ]]; then
        unpack=--unsquash
    elif is_at_least 4.1; then
        unpack=--tmp-sandbox
    else
        unpack=''
    fi
}

# Has the process that shows the image outlive signals that are meant for CMD: some schedulers send
# them to every process of a task (Slurm's proctrack/linuxproc), and without its image CMD can save
# nothing, but dies of SIGBUS. Sets `shield`; empty if Apptainer mounts in another way, or brings a
# program of its own along.
shield_mount() {
    shield=
    [[ $kind == sif && -z $setuid$unmounted && $mounter != "$libexec"/* ]] || return 0
    shield=$tmp/.mount
    quote "$mounter"
    # No here-document: before 5.1 bash writes it to TMPDIR, which may be full.
    printf '#!/bin/sh\ntrap "" HUP USR1 USR2 TERM\nexec %s "$@"\n' "$answer" |
        install -D -m 700 -- /dev/stdin "$shield/${mounter##*/}"
}

# Whether the image could not be mounted after all; sets `unmounted`, or `again` if the mount may
# work now. Only of a start at which CMD did not begin: what CMD says, and how it ends, is not
# looked at. A kernel that gives FUSE to root alone shows only now; a slow file system fails once,
# for then the pages are in memory.
mount_failed() {
    local told lasted tried=0
    again=''
    [[ ! -e $tmp/.started && $status != 0 && -z $signalled ]] || return 1
    [[ $kind == sif && -z $unmounted ]] || return 1
    read_clock
    lasted=$((seconds - run_at))
    if [[ -n $mount_tried ]]; then
        ((lasted >= MOUNT_LIMIT)) || return 1
        unmounted="it took $package too long, twice"
        return
    fi
    mount_tried=yes
    timeout --kill-after=5 "$MOUNT_BOUND" "$apptainer" -q exec ${userns:+"$userns"} \
        ${options[@]+"${options[@]}"} --cleanenv --no-mount home,cwd,tmp "$image" true \
        </dev/null >"$tmp/.told" 2>&1 || tried=$?
    [[ -z $signalled ]] || return 1
    told=$(tail -c 4000 -- "$tmp/.told" | tr -d '\0')
    if ((tried == 0)); then
        ((lasted >= MOUNT_LIMIT)) || return 1
        again=yes
        say_for_node "the image was not mounted in time: it is tried once more" \
            "(APPTRAIN_UNPACK=1 unpacks it instead)"
    elif ((tried == 124 || tried == 137)); then
        unmounted="it takes more than $MOUNT_BOUND s"
    else
        why_unmounted "$told"
    fi
}

# Sets `unmounted` by what Apptainer says; false if that is not about the image. Its versions have
# different words:
#   1.2    ... while mounting image /proc/self/fd/3: squashfuse_ll exited with status 255:
#          fusermount: WHY
#   1.3    ... image driver mount failure: image driver squashfuse_ll instance exited with error:
#          ... exited: WHY
#   all    ... while mounting image /proc/self/fd/3: squashfuse_ll failed to mount /proc/self/fd/3
#          in 10s
why_unmounted() {
    local why
    case $1 in
        *"image driver mount failure"*) ;;
        *"while mounting image"*) ;;
        *"failed to mount /proc/self/fd/"*) ;;
        *) return 1 ;;
    esac
    case $1 in
        *'exited: '*) why=${1##*exited: } ;;
        *'exited with status '*)
            why=${1##*exited with status }
            why=${why#*: }
            ;;
        *'failed to mount '*) why="not done in ${1##*failed to mount * }" ;;
        *) why=${1##*: } ;;
    esac
    unmounted=${why%%$'\n'*}
}
