#include "tests/kernels/cuda/conformance_sm90.cuh"

#include "kernels/cuda/tensor_map.h"
#include "tests/kernels/cuda/conformance.h"
#include "tests/kernels/cuda/conformance_buffer.h"

namespace cpattn::cuda {
namespace {

struct Report {
  cudaStream_t stream;
  bool with_words;
  std::string text;

  /// `num_parts` digests of the words in order.
  void add(const std::string& name, Words& result, std::size_t num_parts) {
    const std::vector<std::uint32_t>& words = result.fetch(stream);
    text += name + ":";
    const std::size_t part = words.size() / num_parts;
    for (std::size_t i = 0; i < num_parts; ++i) text += hex(digest_of(&words[i * part], part), 16);
    text += "\n";
    for (std::size_t i = 0; with_words && i < words.size(); ++i) {
      text += hex(words[i], 8) + (i % 32 == 31 ? "\n" : "");
    }
  }
};

template <int N, class T, Swizzle kSwizzle, bool IsATransposed, bool IsBTransposed,
          bool IsAInRegisters = false>
void add_product(Report& report) {
  Words out(std::size_t{N / 2 * 128});
  launch(product_kernel<N, T, kSwizzle, IsATransposed, IsBTransposed, IsAInRegisters>, dim3(1),
         dim3(128), kProductSharedBytes<N>, report.stream, out.device());
  const char* type = std::is_same_v<T, bf16> ? " bf16" : " f16";
  report.add("wgmma n" + std::to_string(N) + type + ", swizzle " +
                 std::to_string(width_bytes(kSwizzle)) +
                 (IsAInRegisters  ? ", A in registers"
                  : IsATransposed ? ", A [k][m]"
                                  : ", A [m][k]") +
                 (IsBTransposed ? ", B [k][n]" : ", B [n][k]"),
             out, 4);
}

/// Every combination of places for A and B under one swizzle.
template <class T, Swizzle kSwizzle>
void add_layouts(Report& report) {
  add_product<64, T, kSwizzle, false, false>(report);
  add_product<64, T, kSwizzle, false, true>(report);
  add_product<64, T, kSwizzle, true, false>(report);
  add_product<64, T, kSwizzle, true, true>(report);
  add_product<64, T, kSwizzle, false, false, true>(report);
  add_product<64, T, kSwizzle, false, true, true>(report);
}

template <int... N>
void add_widths(Report& report, std::integer_sequence<int, N...>) {
  (add_product<N, bf16, Swizzle::bytes128, false, false>(report), ...);
  (add_product<N, bf16, Swizzle::bytes128, false, false, true>(report), ...);
}

/// B [k][n] comes in whole panels of 64 n.
template <int... N>
void add_transposed_widths(Report& report, std::integer_sequence<int, N...>) {
  (add_product<N, bf16, Swizzle::bytes128, false, true>(report), ...);
  (add_product<N, bf16, Swizzle::bytes128, false, true, true>(report), ...);
}

template <int Rank>
void add_tile(Report& report, const char* name, TiledTensor tensor, const int (&first)[4],
              std::size_t num_words) {
  std::vector<std::uint32_t> source(num_words);
  for (std::uint32_t i = 0; i < source.size(); ++i) source[i] = 2 * i | (2 * i + 1) << 16;
  Words from(std::move(source)), out(kTileBytes / 4);
  tensor.data = from.device();
  tensor.rank = Rank;
  launch(tile_kernel<Rank>, dim3(1), dim3(128), kTileBytes + 8, report.stream,
         make_tensor_map(tensor), first[0], first[1], first[2], first[3], out.device());
  report.add(name, out, 4);
}

void add_bytes(Report& report) {
  std::vector<std::uint32_t> source(kTileBytes / 4 + 4);
  for (std::uint32_t i = 0; i < source.size(); ++i) source[i] = 2 * i | (2 * i + 1) << 16;
  Words from(std::move(source)), out(kTileBytes / 4);
  const auto* bytes = reinterpret_cast<const std::byte*>(from.device());
  launch(bytes_kernel<1040>, dim3(1), dim3(128), kTileBytes + 8, report.stream, bytes + 16,
         out.device());
  report.add("bulk copy of bytes", out, 4);
}

}  // namespace

std::string report_sm90(cudaStream_t stream, bool with_words) {
  Report report{stream, with_words, {}};
  add_layouts<bf16, Swizzle::bytes128>(report);
  add_layouts<bf16, Swizzle::bytes64>(report);
  add_layouts<bf16, Swizzle::bytes32>(report);
  add_layouts<f16, Swizzle::bytes128>(report);
  add_widths(
      report,
      std::integer_sequence<int, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256>{});
  add_transposed_widths(report, std::integer_sequence<int, 128, 192, 256>{});
  // Boxes of 4 KiB, some of them partly outside of the tensor.
  add_tile<2>(report, "TMA 2-D, swizzle 128",
              {.shape = {192, 40},
               .strides_bytes = {0, 400},
               .box = {64, 32},
               .swizzle = Swizzle::bytes128},
              {64, 5, 0, 0}, 4000);
  add_tile<2>(report, "TMA 2-D, swizzle 128, beyond the end",
              {.shape = {150, 40},
               .strides_bytes = {0, 400},
               .box = {64, 32},
               .swizzle = Swizzle::bytes128},
              {128, 20, 0, 0}, 4000);
  add_tile<2>(
      report, "TMA 2-D, swizzle 64, before the beginning",
      {.shape = {64, 80}, .strides_bytes = {0, 128}, .box = {32, 64}, .swizzle = Swizzle::bytes64},
      {-8, -3, 0, 0}, 2560);
  add_tile<2>(
      report, "TMA 2-D, swizzle 32",
      {.shape = {48, 160}, .strides_bytes = {0, 96}, .box = {16, 128}, .swizzle = Swizzle::bytes32},
      {16, 7, 0, 0}, 3840);
  add_tile<2>(report, "TMA 2-D, no swizzle, f32",
              {.element_bytes = 4, .shape = {24, 70}, .strides_bytes = {0, 96}, .box = {16, 64}},
              {8, 2, 0, 0}, 1680);
  // [heads][rows][channels] seen as channels, heads, rows: what a packed tensor of heads is.
  add_tile<3>(report, "TMA 3-D, swizzle 128",
              {.shape = {64, 3, 50},
               .strides_bytes = {0, 128, 384},
               .box = {64, 1, 32},
               .swizzle = Swizzle::bytes128},
              {0, 2, 30, 0}, 4800);
  add_tile<4>(report, "TMA 4-D, swizzle 128",
              {.shape = {64, 2, 3, 10},
               .strides_bytes = {0, 128, 256, 768},
               .box = {64, 1, 4, 8},
               .swizzle = Swizzle::bytes128},
              {0, 1, 1, 4}, 1920);
  add_bytes(report);
  return report.text;
}

}  // namespace cpattn::cuda
