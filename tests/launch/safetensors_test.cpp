#include "launch/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include <gtest/gtest.h>

#include "launch/inputs.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// A path of this test's own, removed at the end.
class ScratchFile {
 public:
  ScratchFile()
      : path_(testing::TempDir() + "cpattn_safetensors_" + std::to_string(::getpid()) + "_" +
              testing::UnitTest::GetInstance()->current_test_info()->name()) {}
  ~ScratchFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

  void write(const std::string& bytes) const {
    // A new file each time: some file systems flush a file that was truncated and rewritten.
    std::filesystem::remove(path_);
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  std::string read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::string path_;
};

std::string with_length(std::uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

/// A whole file of this header and this many bytes of data.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  return with_length(header.size(), header + std::string(data_bytes, 'x'));
}

std::string refusal(const std::string& bytes) {
  const ScratchFile file;
  file.write(bytes);
  try {
    const SafetensorsFile opened(file.path());
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

void expect_refused(const std::string& header, std::size_t data_bytes, const std::string& part) {
  const std::string message = refusal(file_of(header, data_bytes));

  EXPECT_NE(message.find(part), std::string::npos)
      << "header: " << header.substr(0, 200) << "\nmessage: " << message;
}

std::string tensor_text(const std::string& name, const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(Safetensors, ReadsWhatItWrote) {
  const ScratchFile file;
  const std::string ints(12, '\x01'), halves(8, '\x02');
  const std::vector<StoredTensor> tensors{
      {"b.ints", StoredType::i32, {3}, bytes_of(ints)},
      {"a.halves", StoredType::bf16, {2, 1, 2}, bytes_of(halves)},
      {"empty", StoredType::f64, {0, 7}, {}},
      {"scalar \"\\\n", StoredType::u8, {}, bytes_of(ints).first(1)}};

  write_safetensors(file.path(), tensors, {{"maker", "test"}});
  const SafetensorsFile read(file.path());

  ASSERT_EQ(read.tensors().size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const StoredTensor& tensor = read.tensors()[i];
    EXPECT_EQ(tensor.name, tensors[i].name);
    EXPECT_EQ(tensor.type, tensors[i].type);
    EXPECT_EQ(tensor.shape, tensors[i].shape);
    EXPECT_TRUE(std::equal(tensor.bytes.begin(), tensor.bytes.end(), tensors[i].bytes.begin(),
                           tensors[i].bytes.end()));
  }
  EXPECT_EQ(read.metadata().at("maker"), "test");
  EXPECT_EQ(read.find("a.halves"), &read.tensors()[1]);
  EXPECT_EQ(read.find("absent"), nullptr);
}

TEST(Safetensors, AcceptsEveryTypeAtItsSize) {
  for (const auto& type : EnumNames<StoredType>::kValues) {
    const std::size_t bytes = 3 * size_of(type.value);
    const std::string offsets = detail::concat("[0,", bytes, "]");
    const std::string tensor = tensor_text("t", std::string(type.name), "[3]", offsets);
    const std::string header = detail::concat("{", tensor, "}");

    EXPECT_EQ(refusal(file_of(header, bytes)), "accepted") << type.name;
    expect_refused(header, bytes - 1, "holds only");
  }
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  const std::string a = tensor_text("a", "U8", "[2]", "[1,3]");
  const std::string b = tensor_text("b", "U8", "[1]", "[0,1]");
  const std::string empty = tensor_text("e", "F32", "[4,0]", "[1,1]");

  EXPECT_EQ(refusal(file_of("{" + a + "," + b + "," + empty + "}", 3)), "accepted");
  EXPECT_EQ(refusal(file_of("{}", 0)), "accepted");
  EXPECT_EQ(refusal(file_of("{}      ", 0)), "accepted");
  EXPECT_EQ(refusal(file_of("{\"__metadata__\":{\"k\":\"v\"}}", 0)), "accepted");
  EXPECT_EQ(refusal(file_of("{" + tensor_text("\xc3\xa9", "U8", "[1]", "[0,1]") + "}", 1)),
            "accepted");
}

TEST(Safetensors, RefusesWhatIsNoFile) {
  const ScratchFile file;
  EXPECT_THROW(SafetensorsFile{file.path()}, InvalidArgument);         // absent
  EXPECT_THROW(SafetensorsFile{testing::TempDir()}, InvalidArgument);  // a directory
  EXPECT_THROW(SafetensorsFile{""}, InvalidArgument);
  ASSERT_EQ(::mkfifo(file.path().c_str(), 0600), 0);
  EXPECT_THROW(SafetensorsFile{file.path()}, InvalidArgument);  // a pipe nobody writes to
}

TEST(Safetensors, RefusesTruncationAtEveryByte) {
  const std::string whole = file_of("{" + tensor_text("t", "F32", "[2]", "[0,8]") + "}", 8);
  ASSERT_EQ(refusal(whole), "accepted");

  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(refusal(whole.substr(0, size)), "accepted") << size;
  }
  EXPECT_NE(refusal(whole + "x").find("after the last tensor"), std::string::npos);
}

TEST(Safetensors, RefusesHeaderLengths) {
  EXPECT_NE(refusal(with_length(kMaxHeaderBytes + 1, "{}")).find("at most"), std::string::npos);
  EXPECT_NE(refusal(with_length(~0ull, "{}")).find("at most"), std::string::npos);
  EXPECT_NE(refusal(with_length(3, "{}")).find("truncated"), std::string::npos);
  EXPECT_NE(refusal(with_length(1, "{}")).find("not JSON"), std::string::npos);
  EXPECT_NE(refusal(with_length(0, "")).find("does not start"), std::string::npos);
}

TEST(Safetensors, RefusesWhatIsNotTheGrammar) {
  const std::string good = tensor_text("t", "F32", "[2]", "[0,8]");
  expect_refused("[]", 0, "does not start with '{'");
  expect_refused(" {}", 0, "does not start with '{'");
  expect_refused("\xef\xbb\xbf{}", 0, "does not start with '{'");
  expect_refused("{" + good + "}garbage", 8, "not JSON");
  expect_refused("{" + good + "}" + std::string(1, '\0') + "hidden", 8, "zero byte");
  expect_refused("{" + good + ",}", 8, "not JSON");
  expect_refused("{/* c */}", 0, "not JSON");
  expect_refused("{\"\xff\":1}", 0, "not JSON");      // not UTF-8
  expect_refused("{\"\xc0\xaf\":1}", 0, "not JSON");  // overlong UTF-8
  expect_refused("{\"\\ud800\":1}", 0, "not JSON");   // lone surrogate
  expect_refused("{\"t\":1}", 0, "found 1, expected an object");
  expect_refused("{\"t\":null}", 0, "found null");
  expect_refused("{\"t\":[]}", 0, "found an array");
  expect_refused("{\"t\":{}}", 0, "no dtype");
  expect_refused("{\"t\":{\"dtype\":\"F32\"}}", 0, "no shape");
  expect_refused("{\"t\":{\"dtype\":\"F32\",\"shape\":[]}}", 0, "no data_offsets");
  expect_refused("{\"t\":{\"dtype\":\"F32\",\"stride\":[]}}", 0, "field 'stride'");
  expect_refused("{\"t\":{\"dtype\":{}}}", 0, "found an object");
  expect_refused("{\"t\":{\"dtype\":4}}", 0, "found 4, expected dtype to be a string");
  expect_refused("{\"t\":{\"shape\":\"F32\"}}", 0, "found the string 'F32'");
  expect_refused("{\"__metadata__\":{\"k\":1}}", 0, "expected strings");
  expect_refused("{\"__metadata__\":{\"k\":{}}}", 0, "expected strings");
}

TEST(Safetensors, RefusesRepeatedKeys) {
  const std::string good = tensor_text("t", "F32", "[2]", "[0,8]");
  expect_refused("{" + good + "," + good + "}", 8, "names 't' twice");
  expect_refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "names '__metadata__' twice");
  expect_refused("{\"__metadata__\":{\"k\":\"a\",\"k\":\"b\"}}", 0, "key 'k' twice");
  expect_refused("{\"t\":{\"dtype\":\"F32\",\"dtype\":\"F16\"}}", 0, "field 'dtype' twice");
}

TEST(Safetensors, RefusesTypesShapesAndOffsets) {
  const auto one = [](const char* dtype, const char* shape, const char* offsets) {
    return "{" + tensor_text("t", dtype, shape, offsets) + "}";
  };
  expect_refused(one("F33", "[2]", "[0,8]"), 8, "dtype 'F33': expected BOOL");
  expect_refused(one("f32", "[2]", "[0,8]"), 8, "dtype 'f32'");
  expect_refused(one("F32", "[-2]", "[0,8]"), 8, "found -2");
  expect_refused(one("F32", "[-0]", "[0,0]"), 0, "found 0");
  expect_refused(one("F32", "[2.0]", "[0,8]"), 8, "found 2.0");
  expect_refused(one("F32", "[2e0]", "[0,8]"), 8, "found 2e0");
  expect_refused(one("F32", "[true]", "[0,4]"), 4, "found true");
  expect_refused(one("F32", "[\"2\"]", "[0,8]"), 8, "found the string '2'");
  expect_refused(one("F32", "[[2]]", "[0,8]"), 8, "found an array");
  expect_refused(one("F32", "[9223372036854775808]", "[0,8]"), 8, "63 bits");
  expect_refused(one("F32", "[18446744073709551616]", "[0,8]"), 8, "found 18446744073709551616");
  expect_refused(one("F32", "[4611686018427387904]", "[0,0]"), 0, "does not fit into 64 bits");
  expect_refused(one("F32", "[4294967296,4294967296]", "[0,0]"), 0, "does not fit into 64 bits");
  expect_refused(one("F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "dimensions");
  expect_refused(one("F32", "[2]", "[0,4]"), 4, "span 4 bytes, expected 8 for shape [2] of F32");
  expect_refused(one("F32", "[2]", "[8,0]"), 8, "expected begin <= end");
  expect_refused(one("F32", "[2]", "[0,8,8]"), 8, "more than two");
  expect_refused(one("F32", "[2]", "[0]"), 8, "has 1 numbers");
  expect_refused(one("F32", "[2]", "[]"), 8, "has 0 numbers");
  expect_refused(one("F32", "[2]", "[-8,0]"), 8, "found -8");
  expect_refused(one("F32", "[2]", "[18446744073709551608,18446744073709551615]"), 8,
                 "holds only 8 bytes");
  expect_refused(one("F32", "[2]", "[4,12]"), 12, "bytes of no tensor between");
}

TEST(Safetensors, RefusesOverlapsAndHoles) {
  const auto two = [](const char* first, const char* second) {
    return "{" + tensor_text("a", "U8", "[4]", first) + "," +
           tensor_text("b", "U8", "[4]", second) + "}";
  };
  EXPECT_EQ(refusal(file_of(two("[0,4]", "[4,8]"), 8)), "accepted");
  EXPECT_EQ(refusal(file_of(two("[4,8]", "[0,4]"), 8)), "accepted");
  expect_refused(two("[0,4]", "[0,4]"), 8, "overlaps");
  expect_refused(two("[0,4]", "[3,7]"), 8, "tensor 'b': data_offsets begin at 3, expected 4");
  expect_refused(two("[0,4]", "[5,9]"), 9, "bytes of no tensor between");
  expect_refused(two("[1,5]", "[5,9]"), 9, "tensor 'a': data_offsets begin at 1, expected 0");
}

TEST(Safetensors, SurvivesDeepNesting) {
  const std::size_t depth = 1'000'000;
  expect_refused("{\"t\":" + std::string(depth, '['), 0, "found an array");
  std::string objects = "{";
  for (std::size_t i = 0; i < depth; ++i) objects += "\"\":{";
  expect_refused(objects, 0, "field ''");
}

TEST(Safetensors, RefusesAFileThatShrank) {
  const ScratchFile file;
  file.write(file_of("{" + tensor_text("t", "U8", "[100]", "[0,100]") + "}", 100));
  const SafetensorsFile opened(file.path());
  EXPECT_NO_THROW(opened.require_unchanged());

  std::filesystem::resize_file(file.path(), 50);

  EXPECT_THROW(opened.require_unchanged(), InvalidArgument);
}

TEST(Safetensors, WriterRefusesWhatItCouldNotRead) {
  const ScratchFile file;
  const std::string text(8, 'x');
  const StoredTensor good{"t", StoredType::f32, {2}, bytes_of(text)};
  StoredTensor wrong_shape = good, reserved = good, negative = good, not_utf8 = good;
  wrong_shape.shape = {3};
  reserved.name = "__metadata__";
  negative.shape = {-1, -2};
  not_utf8.name = "\xff";

  for (const StoredTensor& tensor : {wrong_shape, reserved, negative, not_utf8}) {
    EXPECT_THROW(write_safetensors(file.path(), std::span(&tensor, 1)), InvalidArgument);
  }
  const std::vector<StoredTensor> twice{good, good};
  EXPECT_THROW(write_safetensors(file.path(), twice), InvalidArgument);
  EXPECT_THROW(write_safetensors("/nonexistent/t", std::span(&good, 1)), InvalidArgument);
  EXPECT_NO_THROW(write_safetensors(file.path(), std::span(&good, 1)));
}

TEST(Safetensors, MessagesShowNamesSafely) {
  EXPECT_EQ(quoted_name("layer.0"), "'layer.0'");
  EXPECT_EQ(quoted_name("a\x1b[31m\n\xff"), "'a\\x1b[31m\\x0a\\xff'");
  EXPECT_EQ(quoted_name(std::string(100, 'n')), "'" + std::string(80, 'n') + "...'");
}

/// A small file with everything a header can hold.
std::string fuzz_seed(const ScratchFile& file) {
  const std::string data(4 * 4 * 8 * 2, '\x3c'), cu(8, '\0');
  const std::vector<StoredTensor> tensors{
      {"layer.0.q", StoredType::bf16, {4, 4, 8}, bytes_of(data).first(256)},
      {"layer.0.k", StoredType::f16, {4, 2, 8}, bytes_of(data).first(128)},
      {"layer.0.v", StoredType::f32, {4, 2, 1}, bytes_of(data).first(32)},
      {"cu_seqlens", StoredType::i32, {2}, bytes_of(cu)},
      {"other", StoredType::u8, {3, 0}, {}}};
  write_safetensors(file.path(), tensors, {{"source", "test"}});
  return file.read();
}

/// One random edit; never empties the text.
void edit(std::string& text, std::mt19937_64& random) {
  static constexpr std::string_view kTokens[] = {"{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 ",",
                                                 ":",
                                                 "\"",
                                                 "-",
                                                 "0",
                                                 "1e9",
                                                 "99999999999999999999",
                                                 "null",
                                                 " ",
                                                 "\"dtype\"",
                                                 "\"shape\"",
                                                 "\"data_offsets\"",
                                                 "\\u0000",
                                                 "9223372036854775807"};
  static constexpr std::string_view kCharacters = "0123456789[]{},:\"";
  const std::size_t place = random() % text.size();
  switch (random() % 7) {
    case 0:
      text[place] = static_cast<char>(text[place] ^ (1 << (random() % 8)));
      break;
    case 1:
      text[place] = static_cast<char>(random());
      break;
    case 2:
      text[place] = kCharacters[random() % kCharacters.size()];
      break;
    case 3:
      text.erase(place, std::min<std::size_t>(1 + random() % 8, text.size() - 1));
      break;
    case 4:
      text.insert(place, kTokens[random() % std::size(kTokens)]);
      break;
    case 5:
      text.insert(place, text.substr(random() % text.size(), random() % 64));
      break;
    case 6:
      text.resize(1 + random() % (text.size() + 16));
      break;
  }
}

/// A mutation of header and data; half of the time one edit of the header with a right length in
/// front, to get past the first checks.
std::string mutated(std::string header, std::string data, std::mt19937_64& random) {
  if (random() % 2 == 0) {
    edit(header, random);
    return with_length(header.size(), header + data);
  }
  const std::size_t rounds = 1 + random() % 4;
  for (std::size_t round = 0; round < rounds; ++round) {
    edit(random() % 8 == 0 ? data : header, random);
  }
  std::string bytes = with_length(header.size(), header + data);
  if (random() % 4 == 0) bytes[random() % 8] = static_cast<char>(random());
  if (random() % 8 == 0) bytes.resize(random() % bytes.size());
  return bytes;
}

/// Reads every row of every source, so that a lie of the header would touch foreign memory.
void read_everything(const std::string& path) {
  for (const auto& source : open_tensor_file(path, "")) {
    const AttentionShape& shape = source->info().shape;
    const SequenceBatch& batch = source->info().batch;
    std::vector<float> out(static_cast<std::size_t>(
        std::max(batch.q_rows * shape.num_heads * shape.head_dim,
                 batch.kv_rows * shape.num_kv_heads * std::max(shape.head_dim, shape.value_dim))));
    source->read(
        TensorRole::q, 0,
        contiguous_tensor(out.data(), DType::f32, {batch.q_rows, shape.num_heads, shape.head_dim}));
    source->read(TensorRole::v, 0,
                 contiguous_tensor(out.data(), DType::f32,
                                   {batch.kv_rows, shape.num_kv_heads, shape.value_dim}));
  }
}

TEST(Safetensors, MutationsOpenOrAreRefused) {
  const ScratchFile file;
  const std::string seed = fuzz_seed(file);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, seed.data(), 8);
  const std::string header = seed.substr(8, header_bytes);
  const std::string data = seed.substr(8 + header_bytes);
  std::mt19937_64 random(20260101);
  int num_opened = 0;
  int num_refused = 0;

  for (int i = 0; i < 10'000; ++i) {
    file.write(mutated(header, data, random));
    try {
      read_everything(file.path());
      ++num_opened;
    } catch (const InvalidArgument&) {
      ++num_refused;
    }
  }

  EXPECT_GT(num_opened, 100);  // else the mutations never get past the first check
  EXPECT_GT(num_refused, 1000);
}

}  // namespace
}  // namespace cpattn
