// cpattn <subcommand>: the table of subcommands.
#include <array>

#include "launch/cli.h"
#include "launch/cli_docs.h"
#include "launch/doctor.h"
#include "launch/parity.h"

int main(int argc, char** argv) {
  using namespace cpattn;
  const std::array subcommands{
      parity_subcommand(),
      Subcommand{"doctor",
                 "says what this machine has and what will therefore work",
                 "cpattn doctor",
                 kNoKnobs,
                 {{"json", "", "prints JSON"}},
                 run_doctor},
      Subcommand{"docs",
                 "prints docs/configuration.md",
                 "cpattn docs > docs/configuration.md",
                 kNoKnobs,
                 {},
                 run_docs},
  };
  return run_command_line(subcommands, argc, argv);
}
