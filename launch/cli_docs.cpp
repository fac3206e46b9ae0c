#include "launch/cli_docs.h"

#include <fmt/format.h>

#include <array>
#include <iostream>

#include "launch/cli_load.h"
#include "launch/cli_values.h"

namespace cpattn {
namespace {

struct Section {
  FieldGroup group;
  std::string_view title;
  std::string_view text;
};

constexpr std::array kSections{
    Section{FieldGroup::lanes, "Lanes",
            "Each knob takes a list; every combination is one lane, run at every size in `cp`."},
    Section{FieldGroup::ring, "Ring", "How a lane is cut, moved and guarded."},
    Section{FieldGroup::kernels, "Kernels", "Which arithmetic."},
    Section{FieldGroup::file, "Inputs from a file",
            "With `tensors`, the file decides shapes and lengths, and the knobs for synthetic "
            "inputs are refused."},
    Section{FieldGroup::synthetic, "Synthetic inputs",
            "Used when `tensors` is not given. `cu_seqlens` replaces `seq_len` and `kv_len`."},
    Section{FieldGroup::heads, "Heads of synthetic inputs", "Refused beside `tensors`, too."},
    Section{FieldGroup::parity, "Comparison and reports", "Flags of `cpattn parity` only."},
    Section{FieldGroup::device, "Device", "A flag of `cpattn parity` and `cpattn plan`."},
    Section{FieldGroup::gpu, "GPUs", "Flags of `cpattn parity`, `cpattn plan` and `cpattn bench`."},
    Section{FieldGroup::planned, "The GPU that is planned for",
            "Flags of `cpattn plan` only: a machine without a GPU can plan for any."},
    Section{FieldGroup::bench, "Benchmark",
            "Flags of `cpattn bench` only; every combination is measured."},
};

constexpr std::string_view kIntroduction =
    R"(# Configuration

<!-- Generated: `build/bin/cpattn docs > docs/configuration.md`; a test fails when it is stale. -->

Every knob is declared once, and is a flag (`--chunk-tokens 64`) and a key of a YAML file
(`chunk_tokens: 64`) given by `--config FILE`. A flag wins over the file, the file over the default.
`--print-config` prints what is in effect, as a file that reads back to the same.

What is accepted, in files and flags alike:

- Integers are plain decimals: `100`, never `0100`, `1e3`, `12.0`, `0x10` or `+5`. Numbers may have
  a fraction and an exponent and are finite. Booleans are `true` and `false`; a boolean flag without
  a value is `true`.
- Quoted text in YAML is text: `"64"` is refused where a number belongs.
- Lists are `[1, 2]`, a block list or a single value in YAML and `1,2` on the command line; they
  have at least one element, and lanes name each value once.
- An unknown or repeated key or flag, an abbreviation, an empty value, and a knob that would have no
  effect beside the others are refused, with file, line and key. So are anchors, aliases, merge
  keys, tags, nested values and a second document.
- Nothing is read from the environment.

"Agreed" knobs must be equal on all ranks: they are compared, by name, before the first exchange.

Exit codes: 0 pass, 1 differs, 2 bad input (nothing was executed), 3 a required part is unavailable,
4 internal (a rank or the network failed, or a bug).
)";

/// '|' would end a cell of the table.
std::string cell(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '|') result += '\\';
    result += c;
  }
  return result;
}

template <class T>
std::string row(const RunField& field, const T& value) {
  const std::string default_text = field.unset.empty()
                                       ? fmt::format("`{}`", format_value(value, ","))
                                       : fmt::format("({})", field.unset);
  return fmt::format("| `{}` | `{}` | {} | {} | {} | {} |\n", field.name, flag_of(field.name),
                     cell(expected_value(field, value)), default_text,
                     field.scope == Scope::agreed ? "yes" : "no", cell(field.help));
}

}  // namespace

std::string configuration_markdown() {
  const RunConfig defaults;
  std::string page(kIntroduction);
  for (const Section& section : kSections) {
    page += fmt::format("\n## {}\n\n{}\n\n", section.title, section.text);
    page += "| Key | Flag | Values | Default | Agreed | Meaning |\n|---|---|---|---|---|---|\n";
    for_each_run_field(defaults, [&](const RunField& field, const auto& value) {
      if (field.group == section.group) page += row(field, value);
    });
  }
  return page;
}

Subcommand docs_subcommand() {
  return {
      "docs",  "prints docs/configuration.md", "cpattn docs > docs/configuration.md", kNoKnobs, {},
      run_docs};
}

int run_docs(const RunConfig&, const CommandLine&) {
  std::cout << configuration_markdown();
  return static_cast<int>(ExitCode::pass);
}

}  // namespace cpattn
