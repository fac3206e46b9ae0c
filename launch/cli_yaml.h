// Configuration files: a flat YAML mapping of knobs, read strictly and written so that it reads
// back.
//
// Accepted: one document, keys once, values that are a scalar or a flat list of scalars. Refused
// with file, line and key: unknown and repeated keys, nested values, anchors, aliases, merge keys,
// tags, empty values, more documents.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launch/cli_values.h"
#include "launch/run_config.h"

namespace cpattn {

/// One knob as it was written in a file or on the command line.
struct Setting {
  std::string key;    ///< of the RunField
  std::string label;  ///< how messages call it: "configs/x.yaml:4: heads" or "--heads"
  bool is_list = false;
  std::vector<ScalarText> items;
};

/// The settings of a file, in its order. InvalidArgument names file and line.
std::vector<Setting> read_yaml_file(const std::string& path);
/// The same from text; `name` stands for the file in messages.
std::vector<Setting> read_yaml(std::string_view text, const std::string& name);

/// All knobs of `config` that have an effect, as a file that reads back to the same.
std::string to_yaml(const RunConfig& config);

}  // namespace cpattn
