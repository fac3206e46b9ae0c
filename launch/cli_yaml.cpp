#include "launch/cli_yaml.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace cpattn {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{4} << 20;

/// Takes the parser's events instead of its node tree: the tree hides repeated keys and resolves
/// aliases, and knows no line of a value that is missing.
class FlatMapping final : public YAML::EventHandler {
 public:
  FlatMapping(std::string_view text, std::string name) : text_(text), name_(std::move(name)) {}

  std::vector<Setting> take() { return std::move(settings_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    require(num_documents_++ == 0, where(mark),
            "expected one list of 'key: value' lines, got another document or other indentation");
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    refuse_anchor(mark, anchor);
    require(depth_ > 0, where(mark), "expected 'key: value' lines, got an empty document");
    require(has_key_, where(mark), "expected a key, got nothing");
    fail_value(mark, "has no value");
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw InvalidArgument(place(mark) + "aliases (*name) are not supported");
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    refuse_anchor(mark, anchor);
    const bool is_quoted = tag == "!";
    require(is_quoted || tag.empty() || tag == "?", place(mark), "tags (", tag,
            ") are not supported");
    require(depth_ > 0, where(mark), "expected 'key: value' lines, got '", value, "'");
    if (is_quoted) refuse_open_quote(mark);
    if (!has_key_) {
      begin_setting(mark, value);
    } else {
      settings_.back().items.push_back({value, is_quoted});
      if (!in_list_) has_key_ = false;
    }
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    refuse_anchor(mark, anchor);
    require(depth_ > 0, where(mark), "expected 'key: value' lines, got a list");
    require(has_key_, where(mark), "expected a key, got a list");
    if (in_list_) fail_value(mark, "a list inside a list is not supported");
    in_list_ = true;
    settings_.back().is_list = true;
  }
  void OnSequenceEnd() override {
    in_list_ = false;
    has_key_ = false;
  }

  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    refuse_anchor(mark, anchor);
    require(depth_ == 0 || has_key_, where(mark), "expected a key, got a mapping");
    if (depth_ > 0) fail_value(mark, "a mapping as a value is not supported");
    ++depth_;
  }
  void OnMapEnd() override { --depth_; }

 private:
  std::string where(const YAML::Mark& mark) const {
    return fmt::format("{}:{}: ", name_, mark.line + 1);
  }
  /// A value is reported at its key: the mark of a missing one is that of the next line.
  std::string place(const YAML::Mark& mark) const {
    return has_key_ ? settings_.back().label + ": " : where(mark);
  }

  void refuse_anchor(const YAML::Mark& mark, YAML::anchor_t anchor) const {
    require(anchor == 0, place(mark), "anchors (&name) are not supported");
  }
  /// yaml-cpp 0.7 takes the end of the file for a closing quote; text over several lines is not
  /// needed here, so a quote must close on its line. Block text (| and >) comes here as well.
  void refuse_open_quote(const YAML::Mark& mark) const {
    const std::string_view rest = text_.substr(std::min<std::size_t>(mark.pos, text_.size()));
    const std::string_view line = rest.substr(0, rest.find('\n'));
    const char quote = line.empty() ? '\0' : line.front();
    std::size_t end = 1;
    while (end < line.size() && line[end] != quote)
      end += line[end] == '\\' && quote == '"' ? 2 : 1;
    require((quote == '"' || quote == '\'') && end < line.size(), place(mark),
            "text must be quoted on one line");
  }
  [[noreturn]] void fail_value(const YAML::Mark& mark, std::string_view problem) const {
    throw InvalidArgument(place(mark) + std::string(problem));
  }

  void begin_setting(const YAML::Mark& mark, const std::string& key) {
    require(key != "<<", where(mark), "merge keys (<<) are not supported");
    for (const Setting& earlier : settings_) {
      require(earlier.key != key, where(mark), key, ": appears twice, first at ",
              earlier.label.substr(0, earlier.label.rfind(": ")));
    }
    settings_.push_back({key, where(mark) + key, false, {}});
    has_key_ = true;
  }

  std::string_view text_;
  std::string name_;
  std::vector<Setting> settings_;
  int num_documents_ = 0;
  int depth_ = 0;
  bool has_key_ = false;  ///< a key was read, its value was not
  bool in_list_ = false;
};

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

}  // namespace

std::vector<Setting> read_yaml(std::string_view text, const std::string& name) {
  require(text.find('\0') == std::string_view::npos && !text.starts_with("\xef\xbb\xbf") &&
              !text.starts_with("\xff\xfe") && !text.starts_with("\xfe\xff"),
          name, ": expected UTF-8 text without a byte order mark");
  std::istringstream stream{std::string(text)};
  FlatMapping mapping(text, name);
  try {
    YAML::Parser parser(stream);
    require(parser.HandleNextDocument(mapping), name, ": holds no settings");
    parser.HandleNextDocument(mapping);  // throws when there is one
  } catch (const YAML::Exception& error) {
    throw InvalidArgument(fmt::format("{}:{}: not YAML: {}", name, error.mark.line + 1, error.msg));
  }
  return mapping.take();
}

std::vector<Setting> read_yaml_file(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  require(status.type() != std::filesystem::file_type::not_found, path, ": no such file");
  require(status.type() != std::filesystem::file_type::none, path, ": ", error.message());
  require(std::filesystem::is_regular_file(status), path, ": not a regular file");
  std::ifstream file(path, std::ios::binary);
  require(file.is_open(), path, ": cannot be read");
  require(std::filesystem::file_size(path, error) <= kMaxFileBytes, path,
          ": a configuration file of more than ", kMaxFileBytes, " bytes is refused");
  std::ostringstream text;
  text << file.rdbuf();
  require(!file.bad(), path, ": cannot be read");
  return read_yaml(text.str(), path);
}

std::string to_yaml(const RunConfig& config) {
  const RunConfig defaults;
  std::string text;
  for_each_effective_field(config, [&](const RunField& field, const auto& value) {
    using Field = std::remove_cvref_t<decltype(value)>;
    text += field.name;
    if constexpr (kIsList<Field>) {
      text += ": [" + format_value(value, ", ") + "]\n";
    } else if constexpr (std::is_same_v<Field, std::string>) {
      text += ": " + (field.rule == TextRule::any ? quoted(value) : value) + "\n";
    } else {
      text += ": " + format_value(value, "") + "\n";
    }
  });
  return text;
}

}  // namespace cpattn
