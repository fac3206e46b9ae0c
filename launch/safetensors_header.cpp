#include "launch/safetensors_header.h"

#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "src/base/error.h"

namespace cpattn {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kMetadataKey = "__metadata__";

/// Walks the header event by event and throws at the first that does not belong: no tree is built,
/// so nesting costs nothing and a repeated key cannot overwrite the first.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { return refuse("null"); }
  bool boolean(bool value) override { return refuse(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return refuse(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return refuse(text); }
  bool binary(binary_t&) override { return refuse("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::shape) {
      require(value <= std::uint64_t{std::numeric_limits<std::int64_t>::max()}, here(),
              "dimension ", value, " does not fit into 63 bits");
      require(entry_.shape.size() < kMaxStoredDims, here(), "more than ", kMaxStoredDims,
              " dimensions");
      entry_.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets) {
      require(num_offsets_ < 2, here(), "more than two data_offsets");
      (num_offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return refuse(std::to_string(value));
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      header_.metadata[metadata_key_] = value;
      return true;
    }
    if (place_ != Place::entry || field_ != "dtype")
      return refuse("the string " + quoted_name(value));
    const std::optional<StoredType> type = from_name<StoredType>(value);
    require(type.has_value(), here(), "dtype ", quoted_name(value), ": expected ",
            choices<StoredType>());
    entry_.type = *type;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::start) {
      place_ = Place::root;
    } else if (place_ == Place::root) {
      place_ = entry_.name == kMetadataKey ? Place::metadata : Place::entry;
      fields_.clear();
      num_offsets_ = 0;
    } else {
      return refuse("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (place_ == Place::root) {
      require(names_.insert(name).second, "file '", path_, "': the header names ",
              quoted_name(name), " twice");
      entry_ = {};
      entry_.name = name;
    } else if (place_ == Place::metadata) {
      require(header_.metadata.emplace(name, "").second, here(), "key ", quoted_name(name),
              " twice");
      metadata_key_ = name;
    } else {
      require(name == "dtype" || name == "shape" || name == "data_offsets", here(), "field ",
              quoted_name(name), ": expected dtype, shape and data_offsets");
      require(fields_.insert(name).second, here(), "field ", quoted_name(name), " twice");
      field_ = name;
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::entry && field_ == "shape") {
      place_ = Place::shape;
    } else if (place_ == Place::entry && field_ == "data_offsets") {
      place_ = Place::offsets;
    } else {
      return refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    require(place_ != Place::offsets || num_offsets_ == 2, here(), "data_offsets has ",
            num_offsets_, " numbers, expected two");
    place_ = Place::entry;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::entry) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        require(fields_.count(field) == 1, here(), "no ", field);
      }
      header_.entries.push_back(std::move(entry_));
    }
    place_ = place_ == Place::root ? Place::start : Place::root;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    throw InvalidArgument(detail::concat("file '", path_, "': header is not JSON at byte ",
                                         position, ": ", quoted_name(error.what(), 240)));
  }

 private:
  enum class Place { start, root, metadata, entry, shape, offsets };

  std::string here() const {
    if (place_ == Place::start) return detail::concat("file '", path_, "': header: ");
    return detail::concat("file '", path_, "': tensor ", quoted_name(entry_.name), ": ");
  }

  std::string expected() const {
    switch (place_) {
      case Place::start:
        return "an object of tensors";
      case Place::root:
        return "an object";
      case Place::metadata:
        return "strings";
      case Place::entry:
        return field_ == "dtype" ? "dtype to be a string" : field_ + " to be an array";
      case Place::shape:
        return "dimensions to be non-negative integers below 2^63";
      case Place::offsets:
        return "data_offsets to be non-negative integers below 2^64";
    }
    return {};
  }

  bool refuse(const std::string& what) const {
    throw InvalidArgument(detail::concat(here(), "found ", what, ", expected ", expected()));
  }

  const std::string& path_;
  SafetensorsHeader header_;
  Place place_ = Place::start;
  HeaderEntry entry_;  // the one being read; its name is set by the key
  std::string field_;
  std::string metadata_key_;
  std::set<std::string> names_;
  std::set<std::string> fields_;
  int num_offsets_ = 0;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(const std::string& path, std::string_view json) {
  require(!json.empty() && json.front() == '{', "file '", path,
          "': the header does not start with '{'");
  // The parser takes a zero byte for the end of its input, which would hide what follows.
  require(json.find('\0') == std::string_view::npos, "file '", path,
          ": the header contains a zero byte");

  HeaderReader reader(path);
  Json::sax_parse(json.begin(), json.end(), &reader);
  return reader.take();
}

std::string safetensors_header_text(const SafetensorsHeader& header) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) root[std::string(kMetadataKey)] = header.metadata;
  for (const HeaderEntry& entry : header.entries) {
    require(entry.name != kMetadataKey && !root.contains(entry.name), "tensor name ",
            quoted_name(entry.name), " is reserved or occurs twice");
    root[entry.name] = {{"dtype", std::string(name_of(entry.type))},
                        {"shape", entry.shape},
                        {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const Json::exception& error) {  // names that are not UTF-8
    throw InvalidArgument(detail::concat("safetensors header: ", quoted_name(error.what(), 240)));
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

}  // namespace cpattn
