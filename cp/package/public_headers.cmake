# Copies the public headers, and what they include, to where a user sees them.
#
#   cmake -DSOURCE=<repository> -DOUT=<folder> -P public_headers.cmake
#
# In the tree, includes are spelled from the repository root ("src/base/dtype.h"). Installed like that they would put
# folders named src and cp on a user's include path, so here they move below cpattn/ and are spelled
# "cpattn/src/base/dtype.h". A user includes the short names below. OUT holds nothing else afterwards; files that did
# not change keep their time stamps.

cmake_minimum_required(VERSION 3.25)

# Short name, and the header behind it.
set(entry_points
  cpattn/context_parallel.h cp/context_parallel.h
  cpattn/shard_tools.h      cp/shard_tools.h
  cpattn/shard_rows.h       cp/shard_rows.h
  cpattn/te_names.h         cp/te_names.h
  cpattn/ordered_sum.h      src/comm/ordered_sum.h
  cpattn/statistics.h       src/comm/max_over_ranks.h
  cpattn/cuda.h             cp/gpu_group.h
  cpattn/mpi.h              src/comm/mpi_comm.h
  cpattn/loopback.h         src/comm/loopback_comm.h
  cpattn/self.h             src/comm/self_comm.h
  cpattn/errors.h           src/base/error.h
)

set(written "")

# put(name text): OUT/name has this text.
function(put name text)
  set(old "")
  if(EXISTS ${OUT}/${name})
    file(READ ${OUT}/${name} old)
  endif()
  if(NOT old STREQUAL "${text}")
    file(WRITE ${OUT}/${name} "${text}")
  endif()
  set(written ${written} ${name} PARENT_SCOPE)
endfunction()

set(queue "")
while(entry_points)
  list(POP_FRONT entry_points short header)
  put(${short} "// Public name of ${header}.\n#pragma once\n\n#include \"cpattn/${header}\"\n")
  list(APPEND queue ${header})
endwhile()

while(queue)
  list(POP_FRONT queue header)
  if(cpattn/${header} IN_LIST written)
    continue()
  endif()
  file(READ ${SOURCE}/${header} text)
  string(REGEX MATCHALL "#include \"[^\"]+\"" includes "${text}")
  list(TRANSFORM includes REPLACE "#include \"([^\"]+)\"" "\\1")
  list(APPEND queue ${includes})
  string(REGEX REPLACE "#include \"([^\"]+)\"" "#include \"cpattn/\\1\"" text "${text}")
  put(cpattn/${header} "${text}")
endwhile()

# The C header includes nothing of ours.
if(EXISTS ${SOURCE}/cp/bindings/c_api.h)
  file(READ ${SOURCE}/cp/bindings/c_api.h text)
  put(cpattn.h "${text}")
endif()

file(GLOB_RECURSE present RELATIVE ${OUT} ${OUT}/*)
list(REMOVE_ITEM present ${written})
foreach(name ${present})
  file(REMOVE ${OUT}/${name})
endforeach()
