# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # host/job.sh and the job scripts read and set some
# Brings the image to the nodes' own disks before an attempt, as `prepare` has decided
# (entrypoint/batch/staging.py). Sourced by host/job.sh; host/stage.sh is a node's part.
#
# A job script that can do so defines
#   on_nodes WHAT [WORD...]   runs host/stage.sh WHAT RANK FOLDER WORD... on each node, its lines to
#                             standard output
#   copy_to NAME...           copies the image to these nodes; sets `copy_error` if it cannot, and
#                             empties `copy_failed` if no other attempt will do better
#
# Reads: hosts, handover_dir, task, asked_to_end and what the image says of it:
#        stage         the directory of the copies, of the same name on all nodes; empty: none
#        stage_bytes, stage_id, stage_digest   what the image is
#        stage_needs   bytes to be free
#        stage_least   so many nodes are enough
#        stage_by_name yes if the user asked for this directory
#        stage_named   yes if the user or the site did
#        each_node     the scheduler's words for a short command on each node
# Sets:  COPY          s for a broadcast, or a wave of copies
#        COPIES        s for all copies
#        REMOVE        s to remove them
#        stage         empty from then on, if all read the shared image
#        staged        words for containers/run.sh; empty if the shared image is read
#        stage_left    the directory in which nodes may have copies that they do not remove
#        states, whys  of each node by its rank: have, room or unfit, and why
#        copy_error    why nothing could be copied
#        copy_failed   yes if it was tried, and another attempt may do better

readonly NODES_TOLD=8  # nodes that are named of many
readonly LOOK=120      # s for all nodes to look
readonly COPY=900      # s for a broadcast, or a wave of copies
readonly COPIES=1800   # s for all of them
readonly CHECK=300     # s to look at them, or to read them whole
readonly REMOVE=20     # s to remove them

# stage_image ARGUMENT...: the job script's, for the image has to be asked again if a node is left
# out.
stage_image() {
    local began
    staged=()
    copy_error=''
    copy_failed=''
    [[ -n $stage ]] || return 0
    read_clock
    began=$seconds
    states=()
    whys=()
    stage_left=$stage
    look_at_nodes "$LOOK" look "$stage_bytes" "$stage_id" "$stage_digest" "$stage_needs" \
        "$stage_named"
    if has_enough have room && [[ $(count_states room) != 0 ]]; then
        copy_image
    fi
    if [[ $(count_states have) != "${#hosts[@]}" ]]; then
        without_copy "$@"
    fi
    [[ -n $stage ]] || return 0
    read_clock
    staged=(--staged "$stage" "$stage_bytes" "$stage_id")
    tell "image: copied to ${stage%/*} on $(count_states have) of ${#hosts[@]} nodes" \
        "in $((seconds - began)) s"
}

# Copies it to the nodes that have room.
copy_image() {
    local rank names=()
    for rank in "${!hosts[@]}"; do
        if [[ ${states[rank]} == room ]]; then
            names+=("${hosts[rank]}")
        fi
    done
    copy_failed=yes
    copy_to "${names[@]}"
    end_if_asked
    look_at_nodes "$CHECK" check "$stage_bytes" "$stage_id" "$stage_digest"
}

# look_at_nodes SECONDS WHAT WORD...: sets `states` and `whys`; a node that was unfit stays so.
look_at_nodes() {
    local bound=$1 rank word text answered='' file=$handover_dir/nodes
    local asked=()
    for rank in "${!hosts[@]}"; do
        if [[ ${states[rank]:-} != unfit ]]; then
            asked[rank]=yes
            states[rank]='unfit'
            whys[rank]='it did not answer'
        fi
    done
    on_nodes "${@:2}" >"$file" || true
    end_if_asked
    while read -r rank word text; do
        if [[ $rank =~ ^(0|[1-9][0-9]{0,5})$ && -n ${asked[rank]:-} &&
            $word == @(have|room|unfit) ]]; then
            states[rank]=$word
            whys[rank]=$text
            answered=yes
        fi
    done <"$file"
    if [[ -z $answered && -z $copy_error ]]; then
        text=$(tail -c 400 -- "$handover_dir/said" | tr '\n' ' ')
        text=${text% }
        copy_error="no node answers: ${text:-nothing is said}"
        copy_failed=yes
    fi
}

end_if_asked() {
    if [[ -n $asked_to_end ]]; then
        exit "$asked_to_end"
    fi
}

# count_states STATE: prints how many nodes are in it.
count_states() {
    local state count=0
    for state in "${states[@]}"; do
        if [[ $state == "$1" ]]; then
            count=$((count + 1))
        fi
    done
    printf '%s' "$count"
}

# has_enough STATE...: whether enough nodes are in one of them to go on. Where the others take no
# part, the first node must be among them.
has_enough() {
    local state count=0 least=1
    for state; do
        count=$((count + $(count_states "$state")))
    done
    if [[ -n $stage_by_name ]]; then
        [[ " $* " == *" ${states[0]} "* ]] || return
        least=$stage_least
    fi
    ((count >= least))
}

# Not all nodes have a copy: the others read the shared image, or take no part, or nobody does.
without_copy() {
    local rank others=() why=$copy_error
    for rank in "${!hosts[@]}"; do
        if [[ ${states[rank]} != have ]]; then
            others+=("$rank")
        fi
    done
    why=${why:-$(name_nodes "${others[@]}")}
    if [[ -z $stage_by_name ]] && ((${#others[@]} == ${#hosts[@]})); then
        say "the image is read where it is, not copied to the nodes: $why"
        unstage
        stage=''
    elif [[ -z $stage_by_name ]]; then
        say "the image is read where it is, by $(name_nodes "${others[@]}")"
    elif has_enough have; then
        say "left out, for the image is not there: $(name_nodes "${others[@]}")"
        for rank in "${others[@]}"; do
            facts+=("left_out=${hosts[rank]}")
        done
        facts+=("again=$attempt")
        prepare_again "$@"
    else
        give_up_staging "${others[@]}"
    fi
}

# name_nodes RANK...: prints those of these nodes that cannot have a copy, and why.
name_nodes() {
    local rank text='' count=0
    for rank; do
        if [[ -n ${whys[rank]} ]] && ((++count <= NODES_TOLD)); then
            text+=${text:+, }"${hosts[rank]} (${whys[rank]})"
        fi
    done
    if ((count > NODES_TOLD)); then
        text+=" and $((count - NODES_TOLD)) more"
    fi
    printf '%s' "$text"
}

# give_up_staging RANK...: the directory was asked for, and too few nodes have the image there.
give_up_staging() {
    local text
    text=${copy_error:-$(name_nodes "$@")}
    if [[ -z $copy_error && ${states[0]} == unfit ]] && ((stage_least < ${#hosts[@]})); then
        text+=", and a job's first node cannot be left out"
    fi
    if [[ -n $copy_failed ]]; then
        say "--stage ${stage%/*}: $text: try again, or leave --stage out"
        exit "$UNAVAILABLE"
    fi
    refuse stage-unfit "--stage ${stage%/*}: $text: give another directory, or leave --stage out"
}

# Removes all copies; nodes that do not answer keep theirs for the next job to remove.
unstage() {
    local bound=$REMOVE status stage=$stage_left
    stage_left=''
    if [[ -n $stage ]]; then
        on_nodes remove >/dev/null 2>&1 || true
    fi
}
