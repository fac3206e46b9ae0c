// cpattn <subcommand>: the table of subcommands.
#include <array>

#include "launch/cli.h"
#include "launch/cli_docs.h"

int main(int argc, char** argv) {
  using namespace cpattn;
  const std::array subcommands{
      Subcommand{"docs",
                 "prints docs/configuration.md",
                 "cpattn docs > docs/configuration.md",
                 kNoKnobs,
                 {},
                 run_docs},
  };
  return run_command_line(subcommands, argc, argv);
}
