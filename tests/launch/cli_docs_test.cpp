#include "launch/cli_docs.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace cpattn {
namespace {

TEST(CliDocs, TheCommittedPageIsWhatTheDeclarationsSay) {
  std::ifstream file("docs/configuration.md");
  std::ostringstream committed;
  committed << file.rdbuf();

  EXPECT_EQ(committed.str(), configuration_markdown())
      << "refresh it: build/bin/cpattn docs > docs/configuration.md";
}

}  // namespace
}  // namespace cpattn
