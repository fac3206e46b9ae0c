#!/bin/sh
# Runs a compiler and keeps what it says beside the object, in OBJECT.log, where the checks of the
# machine code read it: ptxas tells some of what they must know (a wgmma that had to be serialised)
# as information only.
#
#   keep_messages.sh COMPILER ... -o OBJECT ...
object=
previous=
for word in "$@"; do
  [ "$previous" = -o ] && object=$word
  previous=$word
done
"$@" >"$object.log" 2>&1
status=$?
cat "$object.log" >&2
exit $status
