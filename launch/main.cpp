// cpattn <subcommand>: the table of subcommands.
#include <array>

#include "launch/bench.h"
#include "launch/cli.h"
#include "launch/cli_docs.h"
#include "launch/doctor.h"
#include "launch/parity.h"
#include "launch/plan_command.h"

int main(int argc, char** argv) {
  using namespace cpattn;
  const std::array subcommands{
      parity_subcommand(), plan_subcommand(), bench_subcommand(),
      doctor_subcommand(), docs_subcommand(),
  };
  return run_command_line(subcommands, argc, argv);
}
