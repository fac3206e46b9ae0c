#include <unistd.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <limits>

#include <gtest/gtest.h>

#include "launch/inputs.h"
#include "launch/safetensors.h"
#include "src/base/error.h"
#include "tests/launch/inputs_checks.h"

namespace cpattn {
namespace {

// ---------------------------------------------------------------------------------

/// Tensors to put into a file, with bytes of their own.
class FileMaker {
 public:
  FileMaker()
      : path_(testing::TempDir() + "cpattn_inputs_" + std::to_string(::getpid()) + "_" +
              testing::UnitTest::GetInstance()->current_test_info()->name()) {}
  FileMaker(const FileMaker&) = delete;
  FileMaker& operator=(const FileMaker&) = delete;
  ~FileMaker() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

  FileMaker& add(const std::string& name, StoredType type, std::vector<std::int64_t> shape) {
    std::size_t size = size_of(type);
    for (const std::int64_t dim : shape) size *= static_cast<std::size_t>(dim);
    std::string bytes(size, '\0');
    for (char& byte : bytes) {
      byte = static_cast<char>((state_ = state_ * 6364136223846793005u + 1) >> 56 & 0x3f);
    }
    return add(name, type, std::move(shape), bytes);
  }
  FileMaker& add(const std::string& name, StoredType type, std::vector<std::int64_t> shape,
                 const std::string& bytes) {
    const std::string& kept = bytes_.emplace_back(bytes);
    tensors_.push_back({name, type, std::move(shape), std::as_bytes(std::span(kept))});
    return *this;
  }
  template <class Integer>
  FileMaker& add_integers(const std::string& name, StoredType type, std::vector<Integer> values) {
    return add(
        name, type, {static_cast<std::int64_t>(values.size())},
        std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Integer)));
  }
  /// q [rows, 6, 8], k [rows, 2, 8], v [rows, 2, 5] under a prefix.
  FileMaker& add_attention(const std::string& prefix, std::int64_t rows = 10) {
    return add(prefix + "q", StoredType::bf16, {rows, 6, 8})
        .add(prefix + "k", StoredType::f16, {rows, 2, 8})
        .add(prefix + "v", StoredType::f32, {rows, 2, 5});
  }
  const std::string& bytes(std::size_t i) const { return bytes_[i]; }

  std::vector<std::unique_ptr<InputSource>> open(const std::string& only = "") const {
    write_safetensors(path_, tensors_);
    return open_tensor_file(path_, only);
  }
  std::string refusal(const std::string& only = "") const {
    try {
      open(only);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  }

 private:
  std::string path_;
  std::deque<std::string> bytes_;  // addresses stay
  std::vector<StoredTensor> tensors_;
  std::uint64_t state_ = 1;
};

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message << "\nexpected: " << part;
}

TEST(FileInputs, ReadsPlainNames) {
  FileMaker maker;
  const auto sources = maker.add_attention("").open();

  ASSERT_EQ(sources.size(), 1u);
  const InputInfo& info = sources[0]->info();
  EXPECT_EQ(info.name, std::filesystem::path(maker.path()).filename().string());
  EXPECT_EQ(info.shape.num_heads, 6);
  EXPECT_EQ(info.shape.num_kv_heads, 2);
  EXPECT_EQ(info.shape.head_dim, 8);
  EXPECT_EQ(info.shape.value_dim, 5);
  EXPECT_EQ(info.shape.softmax_scale, 1.0 / std::sqrt(8.0));
  ASSERT_EQ(info.batch.documents.size(), 1u);
  EXPECT_EQ(info.batch.documents[0].q_tokens, 10);
  EXPECT_EQ(rows_of(*sources[0], TensorRole::q, DType::bf16, 0, 10), maker.bytes(0));
  EXPECT_EQ(rows_of(*sources[0], TensorRole::k, DType::f16, 0, 10), maker.bytes(1));
  EXPECT_EQ(rows_of(*sources[0], TensorRole::v, DType::f32, 0, 10), maker.bytes(2));
  expect_slices_equal_whole(*sources[0]);
  expect_bad_reads_refused(*sources[0]);
}

TEST(FileInputs, GradientsAreReadWhereTheFileHasThem) {
  FileMaker with;
  const auto given = with.add_attention("m.")
                         .add("m.dout", StoredType::bf16, {10, 6, 5})
                         .add("m.dlse", StoredType::f32, {10, 6})
                         .open();
  const auto made =
      make_synthetic({.shape = given[0]->info().shape, .batch = given[0]->info().batch});

  EXPECT_EQ(rows_of(*given[0], TensorRole::dout, DType::bf16, 0, 10), with.bytes(3));
  EXPECT_EQ(rows_of(*given[0], TensorRole::dlse, DType::f32, 0, 10), with.bytes(4));
  expect_slices_equal_whole(*given[0]);
  expect_bad_reads_refused(*given[0]);
  std::filesystem::remove(with.path());
  FileMaker without;
  const auto absent = without.add_attention("").open();
  for (const TensorRole role : {TensorRole::dout, TensorRole::dlse})
    EXPECT_EQ(rows_of(*absent[0], role, DType::f32, 0, 10),
              rows_of(*made, role, DType::f32, 0, 10));
}

TEST(FileInputs, GradientsThatDoNotFitAreRefused) {
  FileMaker shape;
  shape.add_attention("").add("dout", StoredType::f32, {10, 2, 5});
  expect_part(shape.refusal(), "tensor 'dout': shape [10, 2, 5], expected [10, 6, 5]");
  FileMaker rank;
  rank.add_attention("").add("dlse", StoredType::f32, {10, 6, 1});
  expect_part(rank.refusal(), "tensor 'dlse': shape [10, 6, 1], expected [10, 6]");
  FileMaker type;
  type.add_attention("").add("dout", StoredType::i32, {10, 6, 5});
  expect_part(type.refusal(), "tensor 'dout': dtype I32, expected F32, F16 or BF16");
  FileMaker stray;
  stray.add_attention("m.").add("dout", StoredType::f32, {10, 6, 5});
  expect_part(stray.refusal(), "tensor 'dout' without q, k and v of its prefix");
}

TEST(FileInputs, TensorsNeedNoAlignment) {
  FileMaker maker;
  const auto sources = maker.add("odd", StoredType::u8, {3})
                           .add_attention("m.")
                           .add("tail", StoredType::u8, {1})
                           .open();

  EXPECT_EQ(rows_of(*sources[0], TensorRole::v, DType::f32, 0, 10), maker.bytes(3));
  expect_slices_equal_whole(*sources[0]);
}

TEST(FileInputs, PrefixesComeInFileOrder) {
  FileMaker maker;
  maker.add_attention("layer.15.")
      .add_attention("layer.0.")
      .add("layer.3.out", StoredType::u8, {2});
  const auto sources = maker.open();

  ASSERT_EQ(sources.size(), 2u);
  EXPECT_TRUE(sources[0]->info().name.ends_with(":layer.15"));
  EXPECT_TRUE(sources[1]->info().name.ends_with(":layer.0"));
  const auto one = maker.open("layer.0");
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(rows_of(*one[0], TensorRole::q, DType::bf16, 0, 10), maker.bytes(3));
  expect_part(maker.refusal("layer.1"), "'layer.1', expected one of 'layer.15', 'layer.0'");
}

TEST(FileInputs, DocumentsComeFromCuSeqlens) {
  FileMaker maker;
  const auto sources =
      maker.add_attention("a.")
          .add_attention("b.")
          .add_integers<std::int32_t>("cu_seqlens", StoredType::i32, {0, 4, 4, 10})
          .add_integers<std::int64_t>("b.cu_seqlens", StoredType::i64, {0, 1, 9})
          .add_integers<std::int64_t>("b.cu_seqlens_kv", StoredType::i64, {0, 2, 10})
          .open();

  ASSERT_EQ(sources.size(), 2u);
  const std::vector<Document>& a = sources[0]->info().batch.documents;
  ASSERT_EQ(a.size(), 3u);
  EXPECT_EQ(a[1].q_tokens, 0);
  EXPECT_EQ(a[2].kv_begin, 4);
  EXPECT_EQ(a[2].kv_tokens, 6);
  const std::vector<Document>& b = sources[1]->info().batch.documents;
  ASSERT_EQ(b.size(), 2u);
  EXPECT_EQ(b[1].q_begin, 1);
  EXPECT_EQ(b[1].kv_begin, 2);
  EXPECT_EQ(b[1].kv_tokens, 8);
}

TEST(FileInputs, RefusesCuSeqlens) {
  const auto refusal_of = [](const std::vector<std::int64_t>& cu) {
    return FileMaker().add_attention("").add_integers("cu_seqlens", StoredType::i64, cu).refusal();
  };
  EXPECT_EQ(refusal_of({0, 10}), "accepted");
  expect_part(refusal_of({0, 5, 4}), "tensor 'cu_seqlens': ");
  expect_part(refusal_of({0, 11}), "11");
  expect_part(refusal_of({1, 10}), "expected 0");
  expect_part(refusal_of({}), "empty");
  expect_part(refusal_of({0, -1}), "-1");
  expect_part(FileMaker().add_attention("").add("cu_seqlens", StoredType::f32, {2}).refusal(),
              "dtype F32, expected I32 or I64");
  expect_part(FileMaker().add_attention("").add("cu_seqlens", StoredType::i32, {1, 2}).refusal(),
              "2 dimensions, expected one");
  expect_part(FileMaker().add_attention("").add("cu_seqlens_kv", StoredType::i32, {1}).refusal(),
              "'cu_seqlens_kv' without cu_seqlens");
  expect_part(FileMaker().add_attention("a.").add("b.cu_seqlens", StoredType::i32, {1}).refusal(),
              "'b.cu_seqlens' without q, k and v");
}

TEST(FileInputs, RefusesWhatIsMissing) {
  const auto bf16 = StoredType::bf16;
  expect_part(FileMaker().refusal(), "no tensors q, k, v");
  expect_part(FileMaker().add("query", bf16, {1, 1, 1}).refusal(), "no tensors q, k, v");
  expect_part(FileMaker().add("q", bf16, {1, 1, 1}).refusal(), "no tensor 'k'");
  expect_part(FileMaker().add("l.q", bf16, {1, 1, 1}).add("k", bf16, {1, 1, 1}).refusal(),
              "no tensor 'l.k'");
  expect_part(FileMaker().add_attention("a.").add("b.v", bf16, {1, 1, 1}).refusal(),
              "no tensor 'b.q'");
  expect_part(FileMaker().add_attention(".").refusal(), "expected a prefix before the dot");
}

TEST(FileInputs, RefusesLengthsUnderAnotherName) {
  // Ignored, as other tensors are, they would make one document of several.
  for (const char* name : {"cu_seqlen", "cu_seqlens_q", "a.cu_seqlens_k"}) {
    expect_part(FileMaker().add_attention("a.").add(name, StoredType::i32, {2}).refusal(),
                "expected cu_seqlens or cu_seqlens_kv");
  }
  EXPECT_EQ(FileMaker().add_attention("a.").add("a.lse", StoredType::f32, {2}).refusal(),
            "accepted");
}

TEST(FileInputs, RefusesWhatDoesNotFitTogether) {
  using Shape = std::vector<std::int64_t>;
  const auto refusal_of = [](const Shape& q, const Shape& k, const Shape& v,
                             StoredType type = StoredType::bf16) {
    return FileMaker().add("q", type, q).add("k", type, k).add("v", type, v).refusal();
  };
  EXPECT_EQ(refusal_of({3, 4, 8}, {5, 2, 8}, {5, 2, 256}), "accepted");
  EXPECT_EQ(refusal_of({0, 4, 8}, {0, 2, 8}, {0, 2, 8}), "accepted");
  expect_part(refusal_of({3, 4, 8}, {5, 3, 8}, {5, 3, 8}), "4 heads, expected a multiple of the 3");
  expect_part(refusal_of({3, 4, 8}, {5, 2, 7}, {5, 2, 8}), "tensor 'k': head dimension 7");
  expect_part(refusal_of({3, 4, 8}, {5, 2, 8}, {4, 2, 8}), "tensor 'v': 4 rows, expected 5");
  expect_part(refusal_of({3, 4, 8}, {5, 2, 8}, {5, 1, 8}), "tensor 'v': 1 heads, expected 2");
  expect_part(refusal_of({3, 32}, {5, 2, 8}, {5, 2, 8}), "tensor 'q': 2 dimensions");
  expect_part(refusal_of({3, 4, 257}, {5, 2, 257}, {5, 2, 8}), "expected 1 to 256");
  expect_part(refusal_of({3, 4, 8}, {5, 2, 8}, {5, 2, 0}), "tensor 'v': head dimension 0");
  expect_part(refusal_of({3, 0, 8}, {5, 2, 8}, {5, 2, 8}), "tensor 'q': 0 heads");
  expect_part(refusal_of({3, 4, 8}, {5, 2, 8}, {5, 2, 8}, StoredType::f64), "dtype F64");
  expect_part(refusal_of({0, 1 << 21, 8}, {0, 2, 8}, {0, 2, 8}), "heads, expected 1 to");
}

TEST(FileInputs, ConversionRoundsOnceAndKeepsNaN) {
  const std::vector<float> values{1.0f + 0x1p-8f,
                                  1.0f + 0x1p-8f + 0x1p-23f,
                                  -65520.0f,
                                  0x1p-25f,
                                  std::numeric_limits<float>::quiet_NaN(),
                                  std::bit_cast<float>(0x7f800001u)};  // signalling, payload low
  const std::string bytes(reinterpret_cast<const char*>(values.data()), 4 * values.size());
  FileMaker maker;
  for (const char* name : {"q", "k", "v"}) maker.add(name, StoredType::f32, {1, 1, 6}, bytes);
  const auto sources = maker.open();

  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::string rows = rows_of(*sources[0], TensorRole::v, dtype, 0, 1);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, rows.data() + 2 * i, 2);
      EXPECT_EQ(bits, dtype == DType::bf16 ? to_bf16(values[i]).bits : to_f16(values[i]).bits) << i;
      EXPECT_EQ(std::isnan(load_as_float(rows.data(), dtype, static_cast<std::int64_t>(i))),
                i >= 4);
    }
  }
  EXPECT_EQ(rows_of(*sources[0], TensorRole::q, DType::f32, 0, 1), bytes);
}

TEST(FileInputs, RefusesToReadAFileThatShrank) {
  FileMaker maker;
  const auto sources = maker.add_attention("").open();
  EXPECT_NO_THROW(rows_of(*sources[0], TensorRole::q, DType::f32, 0, 10));

  std::filesystem::resize_file(maker.path(), 400);

  EXPECT_THROW(rows_of(*sources[0], TensorRole::q, DType::f32, 0, 10), InvalidArgument);
}

/// Smallest scaled logit that the causal mask lets through, in double.
double smallest_causal_logit(const InputSource& source) {
  const std::vector<float> q = floats_of(source, TensorRole::q);
  const std::vector<float> k = floats_of(source, TensorRole::k);
  const AttentionShape& shape = source.info().shape;
  double smallest = 0.0;
  for (std::int64_t i = 0; i < source.info().batch.q_rows; ++i) {
    for (std::int64_t head = 0; head < shape.num_heads; ++head) {
      const float* const a = q.data() + (i * shape.num_heads + head) * shape.head_dim;
      for (std::int64_t j = 0; j <= i; ++j) {
        const std::int64_t kv_head = head / shape.group_size();
        const float* const b = k.data() + (j * shape.num_kv_heads + kv_head) * shape.head_dim;
        double dot = 0.0;
        for (std::int64_t c = 0; c < shape.head_dim; ++c) dot += static_cast<double>(a[c]) * b[c];
        smallest = std::min(smallest, dot * shape.softmax_scale);
      }
    }
  }
  return smallest;
}

/// What tests/data/README.md says of the committed sample. The logits there are of q, k before
/// their rounding to bf16, which moves a logit by at most 2^-8 |q| |k| / 8, here less than 1.
TEST(FileInputs, TheSampleIsWhatItsReadmeSays) {
  const auto sources = open_tensor_file("tests/data/smollm2_qkv.safetensors", "");

  ASSERT_EQ(sources.size(), 2u);
  EXPECT_EQ(sources[0]->info().name, "smollm2_qkv.safetensors:layer.0");
  EXPECT_EQ(sources[1]->info().name, "smollm2_qkv.safetensors:layer.18");
  for (const auto& source : sources) {
    EXPECT_EQ(source->info().shape.num_heads, 9);
    EXPECT_EQ(source->info().shape.num_kv_heads, 3);
    EXPECT_EQ(source->info().shape.head_dim, 64);
    EXPECT_EQ(source->info().shape.value_dim, 64);
    EXPECT_EQ(source->info().batch.q_rows, 1250);
    EXPECT_EQ(source->info().batch.documents.size(), 1u);
    for (const TensorRole role : kRoles) {
      for (const float x : floats_of(*source, role)) ASSERT_TRUE(std::isfinite(x));
    }
  }
  EXPECT_NEAR(smallest_causal_logit(*sources[0]), -22.55, 1.0);
  EXPECT_NEAR(smallest_causal_logit(*sources[1]), -65.26, 1.0);
}

}  // namespace
}  // namespace cpattn
