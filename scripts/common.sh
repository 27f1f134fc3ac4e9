# Shared by the scripts beside it; sourced, not run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-auto}
export PATH=$PATH:/usr/sbin:/sbin

# Optimised, with debug assertions: they check the order of locks and the state before each write.
checked=(
    --profile checked
    --config 'profile.checked.inherits="profiling"'
    --config 'profile.checked.debug-assertions=true'
    --config 'profile.checked.overflow-checks=true'
    --config 'profile.checked.lto=false'
    --config 'profile.checked.codegen-units=16'
)

say() { printf '\n== %s\n' "$*"; }
fail() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# need COMMAND PACKAGE [COMMAND PACKAGE …]: installs the Debian packages of the commands that are missing.
need() {
    local missing=()
    while [ $# -gt 0 ]; do
        compgen -G "$1" >/dev/null 2>&1 || command -v "$1" >/dev/null 2>&1 || missing+=("$2")
        shift 2
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        fail "these packages are missing: ${missing[*]}; install them, for example: sudo apt-get install ${missing[*]}"
    fi
    say "installing ${missing[*]}"
    apt-get update -qq </dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
}

# Rust, as new as Cargo.toml asks for, and a linker for it.
need_rust() {
    local wanted found program
    wanted=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$root/Cargo.toml")
    local advice="install Rust $wanted or newer from https://rustup.rs, or update it with: rustup update stable"
    for program in rustc cargo; do
        command -v $program >/dev/null 2>&1 || fail "$program is missing; $advice"
        # Debian's packages may be too old, and cargo would only report "failed to parse manifest".
        found=$(cd "$root" && $program --version | awk '{ print $2 }') || fail "$program cannot be run; $advice"
        [ "$(printf '%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1)" = "$wanted" ] ||
            fail "$(command -v $program) is version $found, and Cairn needs Rust $wanted or newer; $advice"
    done
    need cc gcc ld binutils
    echo 'int main(void){return 0;}' | cc -x c -o /dev/null - 2>/dev/null || need /nonexistent libc6-dev
}

fuse_is_usable() { [ -c /dev/fuse ] && [ -r /dev/fuse ] && [ -w /dev/fuse ]; }

need_root() { [ "$(id -u)" -eq 0 ] || fail "this must run as root, because it $1"; }

# Builds the command, and sets $cairn. CAIRN_PROFILE=checked makes the build with debug assertions instead of the release,
# CAIRN_PROFILE=profiling the release with line numbers; CAIRN names a command that is already built.
build() {
    local arguments=(build --locked -p cairn --bin cairn) folder=${CAIRN_PROFILE:-release}
    case $folder in
        release | profiling) arguments+=(--profile "$folder") ;;
        checked) arguments+=("${checked[@]}") ;;
        *) fail "CAIRN_PROFILE=$folder: use release, profiling or checked" ;;
    esac
    if [ -z "${CAIRN:-}" ]; then (cd "$root" && cargo "${arguments[@]}" </dev/null); fi
    cairn=${CAIRN:-$CARGO_TARGET_DIR/$folder/cairn}
}

# cairn torture with CAIRN_SEED and CAIRN_WORK; it makes its own folder, and cleans up.
torture() { "$cairn" torture "$@" ${CAIRN_SEED:+--seed "$CAIRN_SEED"} ${CAIRN_WORK:+--work "$CAIRN_WORK"} </dev/null; }

# A folder for this run. The folder and everything mounted below it are removed, however the script ends. CAIRN_WORK
# names the folder in which it is made.
make_work() {
    work=$(mktemp -d "${CAIRN_WORK:-${TMPDIR:-/tmp}}/cairn-$(basename "$0")-XXXXXX")
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

mounts_below() { awk -v d="$1/" 'index($5 "/", d) == 1 { print $5 }' /proc/self/mountinfo | sort -r; }

# Ends a mount: in order when its server lives, otherwise by force.
end_mount() {
    "${cairn:-cairn}" umount "$1" >/dev/null 2>&1 || umount "$1" 2>/dev/null || umount -l "$1" 2>/dev/null || fusermount3 -u -z "$1" 2>/dev/null || true
}

clean_up() {
    local code=$? mount device
    trap '' INT TERM
    trap - EXIT
    cd /
    declare -F clean_up_more >/dev/null && clean_up_more || true
    for mount in $(mounts_below "$work"); do end_mount "$mount"; done
    if command -v losetup >/dev/null 2>&1; then
        for device in $(losetup --list --noheadings --output NAME,BACK-FILE 2>/dev/null | awk -v d="$work/" 'index($2, d) == 1 { print $1 }'); do
            losetup --detach "$device" 2>/dev/null || true
        done
    fi
    rm -rf -- "$work"
    exit "$code"
}
