// Trains a small transformer over MPI and prints the bits of its loss, which are the same at every
// context-parallel size, also when the size changes in the middle of a run.
#include <cpattn/context_parallel.h>
#include <cpattn/mpi.h>

#include <bit>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "batch.h"
#include "model.h"

namespace {

constexpr std::string_view kUsage =
    R"(usage: mpirun -n N cpattn_example_trainer [--text FILE] [--phases CP:STEPS,...] [--tokens N]

Trains a small causal transformer (grouped-query attention, RoPE, packed documents, Adam) on the
bytes of a text. The last line is loss_hex=0x..., the bits of the last step's loss.

  --text FILE         text whose paragraphs are the documents (default: tests/data/text.txt)
  --phases CP:STEPS   CP sizes one after the other, e.g. 4:10,1:10,3:10: the ranks form groups of CP
                      ranks (the last may be smaller), each group trains the same model, and every
                      next phase goes on with the parameters that are there (default: all ranks:20)
  --tokens N          tokens of a batch (default: 640)
)";

struct Phase {
  int cp = 0;  ///< 0: all ranks
  int steps = 20;
};

struct Options {
  std::string text = "tests/data/text.txt";
  std::vector<Phase> phases{Phase{}};
  int tokens = 640;
  bool is_help = false;
};

int positive(std::string_view name, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1) {
    throw std::invalid_argument(std::string(name) + ": '" + std::string(text) +
                                "', expected a positive integer");
  }
  return value;
}

std::vector<Phase> parse_phases(std::string_view text) {
  std::vector<Phase> phases;
  while (true) {
    const std::size_t comma = std::min(text.find(','), text.size());
    const std::string_view item = text.substr(0, comma);
    const std::size_t colon = item.find(':');
    if (colon == std::string_view::npos) {
      throw std::invalid_argument("--phases: '" + std::string(item) + "', expected CP:STEPS");
    }
    phases.push_back({positive("--phases", item.substr(0, colon)),
                      positive("--phases", item.substr(colon + 1))});
    if (comma == text.size()) return phases;
    text.remove_prefix(comma + 1);
  }
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--help") {
      options.is_help = true;
      return options;
    }
    if (i + 1 == argc) {
      throw std::invalid_argument(std::string(name) + ": unknown, or without its value");
    }
    const std::string_view value = argv[++i];
    if (name == "--text") {
      options.text = value;
    } else if (name == "--phases") {
      options.phases = parse_phases(value);
    } else if (name == "--tokens") {
      options.tokens = positive(name, value);
    } else {
      throw std::invalid_argument(std::string(name) + ": unknown option, see --help");
    }
  }
  return options;
}

/// All groups trained the same model: their losses must have the same bits.
void check_equal(cpattn::Communicator& world, float loss) {
  const auto all = world.all_gather(std::as_bytes(std::span(&loss, 1)),
                                    cpattn::deadline_after(cpattn::Seconds(60)), "losses");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (std::memcmp(all[rank].data(), all[0].data(), sizeof(loss)) != 0) {
      throw std::runtime_error("rank " + std::to_string(rank) + " has another loss than rank 0");
    }
  }
}

void train(const Options& options) {
  cpattn::MpiCommunicator world;
  const bool is_speaker = world.rank() == 0;
  const std::vector<std::string> paragraphs = trainer::read_paragraphs(options.text);
  trainer::Model model(trainer::ModelShape{});
  const cpattn::CpConfig config{.chunk_tokens = 32};
  float loss = 0.0f;
  int step = 0;
  for (const Phase& phase : options.phases) {
    const int cp = phase.cp == 0 ? world.size() : phase.cp;
    if (cp > world.size()) {
      throw std::invalid_argument("--phases: CP size " + std::to_string(cp) + ", there are only " +
                                  std::to_string(world.size()) + " ranks");
    }
    // Nothing is handed over from phase to phase but the parameters, which every rank has.
    const std::shared_ptr<cpattn::Communicator> group =
        world.split(world.rank() / cp, world.rank());
    const cpattn::ContextParallelAttention attention(group, config);
    if (is_speaker) std::printf("context-parallel size %d\n", cp);
    for (int i = 0; i < phase.steps; ++i) {
      trainer::LocalBatch batch = trainer::make_local(
          attention, model.shape(), trainer::make_batch(paragraphs, options.tokens, step));
      loss = model.train(batch, ++step, 3e-3f);
      if (is_speaker && (step % 5 == 1 || i + 1 == phase.steps)) {
        std::printf("step %3d  loss %.6f\n", step, static_cast<double>(loss));
        std::fflush(stdout);
      }
    }
    check_equal(world, loss);
  }
  if (is_speaker) std::printf("loss_hex=0x%08x\n", std::bit_cast<std::uint32_t>(loss));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpattn_example_trainer: %s\n", error.what());
    return 2;
  }
  if (options.is_help) {
    std::fwrite(kUsage.data(), 1, kUsage.size(), stdout);
    return 0;
  }
  try {
    const cpattn::MpiSession session(&argc, &argv);
    train(options);
  } catch (const std::exception& error) {
    // A rank that ends alone, with an exit code, makes mpirun end the others.
    std::fprintf(stderr, "cpattn_example_trainer: %s\n", error.what());
    return 1;
  }
  return 0;
}
