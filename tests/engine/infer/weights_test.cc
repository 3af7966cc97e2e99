// Weights for inference: each is stored once, as it is in the files or rounded once, and read
// without the memory or the bytes of others.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "core/system/files.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/infer/engine.h"
#include "engine/model/initialize.h"
#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tests/engine/infer/quantized_folder.h"
#include "tests/engine/infer/set_weights.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;
using Json = nlohmann::ordered_json;

/// Shards of whole tensors in f32, one element after the other.
std::vector<float> read_reference(const WeightFiles& files, const ModelLayout& layout) {
  std::vector<float> values(size_t(layout.size));
  for (const Parameter& p : layout.parameters) {
    const StoredTensor tensor = files.require(p.name, p.shape);
    const LocalShard shard = local_shard(p);
    const SafetensorsEntry& entry = tensor.slice ? *tensor.slice->whole : *tensor.entry;
    const StoredSlice at =
        tensor.slice
            ? *tensor.slice
            : StoredSlice{.first = 0, .row_stride = shard.whole_columns, .column_stride = 1};
    std::vector<float> whole(size_t(entry.elements()));
    tensor.file->read_f32(entry, 0, whole);
    for (int64_t row = 0; row < shard.rows; ++row) {
      for (int64_t column = 0; column < shard.columns; ++column) {
        values[size_t(p.offset + row * shard.row_stride + column)] =
            whole[size_t(at.first + (shard.first / shard.whole_columns + row) * at.row_stride +
                         (shard.first % shard.whole_columns + column) * at.column_stride)];
      }
    }
  }
  return values;
}

/// Whether norms, biases and routers are the expected values, and all others these in bf16.
bool is_rounded_once(const Weights& weights, const ModelLayout& layout,
                     std::span<const float> expected) {
  const WeightViews& views = weights.views();
  if (views.f32.data() || views.elements() != layout.size) return false;
  const auto* const working = views.working.as<const BFloat16>();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (working[i].bits != BFloat16::from_float(expected[i]).bits) return false;
  }
  for (const Parameter& p : layout.parameters) {
    if (p.shape.size() > 1 && p.sharding.over_tp()) continue;
    const FlatRange range = local_range(p);
    const Tensor exact = weights.vector(range.begin, range.count);
    if (std::memcmp(exact.data(), expected.data() + range.begin, exact.bytes()) != 0) return false;
  }
  return true;
}

void read(const WeightFiles& files, const ModelLayout& layout, const Weights& weights) {
  ParameterReader reader(files, {});
  for (const Parameter& p : layout.parameters) reader.read(p, weights.views(local_range(p)));
}

/// The weights of each rank of 1 and of 2, in bf16 and in f32, are those of `values`.
void expect_weights(const ModelConfig& config, const WeightFiles& files, const WeightFiles& values,
                    const std::string& what) {
  for (const int tp : {1, 2}) {
    for (int rank = 0; rank < tp; ++rank) {
      const ModelLayout layout(config, tp, rank);
      const std::vector<float> expected = read_reference(values, layout);
      const Weights bf16({}, layout, DType::bf16, false), f32({}, layout, DType::f32);
      read(files, layout, bf16), read(files, layout, f32);
      const std::string where = fmt::format("{}, rank {} of {}", what, rank, tp);
      EXPECT_TRUE(is_rounded_once(bf16, layout, expected)) << where;
      EXPECT_EQ(std::memcmp(f32.values().data(), expected.data(), f32.values().bytes()), 0)
          << where;
    }
  }
}

StoredModel open_quietly(const std::string& folder) {
  return open_model(folder, [](const std::string&) {});
}

/// Matrices of many blocks; the columns of attention and MLP are those of one matrix.
ModelConfig large_model() {
  ModelConfig config = small_model(kVariants[3]);
  config.vocab = 2048;
  config.hidden = 96;
  config.ffn = 1500;
  return config;
}

constexpr std::array kStored = {DType::f32, DType::bf16, DType::f16};

TEST(InferenceWeights, AreThoseOfTheFilesRoundedOnce) {
  const std::string folder = make_scratch_folder("once");
  std::vector<std::pair<std::string, Json>> models;
  for (const FamilyCase& each : family_cases())
    models.emplace_back(each.name, each.expected["config"]);
  for (const Variant& variant : kVariants) {
    ModelConfig config = small_model(variant);
    config.vocab = kBos + 1;
    models.emplace_back(variant.name, Json::parse(to_json(config)));
  }
  for (size_t i = 0; i < models.size(); ++i) {
    std::filesystem::remove_all(folder);
    write_folder(folder, models[i].second, kStored[i % kStored.size()], 1 + i % 2);
    const StoredModel stored = open_quietly(folder);
    expect_weights(stored.config, stored.weights, stored.weights, models[i].first);
  }
  std::filesystem::remove_all(folder);
}

TEST(InferenceWeights, OfCodesAreTheDequantizedOnes) {
  const std::string folder = make_scratch_folder("codes");
  const std::vector<QuantizedCase> cases = quantized_cases();
  for (size_t i = 0; i < cases.size(); ++i) {
    for (const FamilyCase& each : family_cases()) {
      if (each.name != (i % 2 == 0 ? "qwen3_moe, form 5" : "qwen3, form 5")) continue;
      std::filesystem::remove_all(folder);
      write_quantized_folder(folder, each.expected["config"], cases[i]);
      const StoredModel stored = open_quietly(folder);
      expect_weights(stored.config, stored.weights, WeightFiles(folder + "/values"), cases[i].name);
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(InferenceWeights, OfANewModelAreThoseInF32Rounded) {
  for (const Variant& variant : kVariants) {
    ModelConfig config = small_model(variant);
    config.vocab = 4096;
    for (const int rank : {0, 1}) {
      const ModelLayout layout(config, 2, rank);
      std::vector<float> expected(size_t(layout.size));
      for (const Parameter& p : layout.parameters) {
        const LocalShard shard = local_shard(p);
        const bool ends_branch = p.sharding.tp_dim == 1;
        const float scale =
            float(0.02 * (ends_branch ? 1 / std::sqrt(2.0 * double(config.layers)) : 1));
        for (int64_t i = 0; i < shard.rows * shard.columns; ++i) {
          const int64_t row = i / shard.columns, column = i % shard.columns;
          const auto whole = uint64_t(shard.first + row * shard.whole_columns + column);
          expected[size_t(p.offset + row * shard.row_stride + column)] =
              p.shape.size() == 1 ? p.initial : scale * normal(5, stream_of(p.name.c_str()), whole);
        }
      }
      const Weights bf16({}, layout, DType::bf16, false), f32({}, layout, DType::f32);
      initialize_parameters({}, layout, config, 5, bf16.views());
      initialize_parameters({}, layout, config, 5, f32.views());
      EXPECT_TRUE(is_rounded_once(bf16, layout, expected)) << variant.name;
      EXPECT_EQ(std::memcmp(f32.values().data(), expected.data(), f32.values().bytes()), 0)
          << variant.name;
    }
  }
}

/// A rank of two reads its rows and columns and no other bytes.
void expect_bytes_read(const WeightFiles& files, int rank, DType dtype) {
  const ModelLayout layout(large_model(), 2, rank);
  const Weights weights({}, layout, DType::bf16, false);
  const uint64_t before = file_bytes_moved();
  ParameterReader reader(files, {});
  int64_t elements = 0;
  for (const Parameter& p : layout.parameters) {
    reader.read(p, weights.views(local_range(p)));
    elements += local_shard(p).rows * local_shard(p).columns;
  }
  EXPECT_EQ(reader.bytes(), elements * int64_t(size_of(dtype)));
  EXPECT_EQ(file_bytes_moved() - before, uint64_t(reader.bytes())) << name_of(dtype);
}

/// Writes the bits of an element of a tensor in model.safetensors.
template <typename Bits>
void overwrite(const std::string& folder, const std::string& name, int64_t element, Bits bits) {
  const std::string path = folder + "/model.safetensors";
  const uint64_t begin = SafetensorsFile(path).find(name)->begin;
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  uint64_t header = 0;
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  file.seekp(int64_t(8 + header + begin) + element * int64_t(sizeof bits));
  file.write(reinterpret_cast<const char*>(&bits), sizeof bits);
  ASSERT_TRUE(file.good());
}

/// The second of two ranks, which reads the element, names it.
void expect_refusal(const std::string& folder, const std::string& name, int64_t element) {
  const WeightFiles files(folder);
  for (const int rank : {0, 1}) {
    const ModelLayout layout(large_model(), 2, rank);
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const Weights weights({}, layout, dtype, false);
      std::string error;
      try {
        read(files, layout, weights);
      } catch (const IoError& thrown) {
        error = thrown.what();
      }
      const std::string expected = fmt::format(
          "{}/model.safetensors: tensor '{}': element {} is -inf: expected finite numbers", folder,
          name, element);
      EXPECT_EQ(error, rank == 0 ? "" : expected);
    }
  }
}

TEST(InferenceWeights, OfManyBlocksAreReadByTheRanksThatHaveThem) {
  const std::string folder = make_scratch_folder("blocks");
  const std::string name = "model.layers.1.mlp.down_proj.weight";  // [96, 1500], by columns
  for (const DType dtype : kStored) {
    std::filesystem::remove_all(folder);
    write_folder(folder, Json::parse(to_json(large_model())), dtype, 1);
    const WeightFiles files(folder);
    expect_weights(large_model(), files, files, std::string(name_of(dtype)));
    for (const int rank : {0, 1}) expect_bytes_read(files, rank, dtype);
    for (const int64_t element : {95 * 1500 + 750, 70 * 1500 + 1499}) {  // the first one is named
      if (dtype == DType::f32) {
        overwrite(folder, name, element, -std::numeric_limits<float>::infinity());
      } else {
        overwrite(folder, name, element,
                  dtype == DType::bf16 ? uint16_t{0xff80} : uint16_t{0xfc00});
      }
      expect_refusal(folder, name, element);
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(InferenceWeights, FirstElementThatIsNotFiniteIsFound) {
  for (int64_t count = 0; count < 40; ++count) {
    std::vector<float> f32(size_t(count), std::numeric_limits<float>::max());
    std::vector<BFloat16> bf16(size_t(count), BFloat16{0xff7f});  // the lowest finite number
    const auto first = [](auto& values) {
      return first_not_finite(Tensor::of(std::span(values), {int64_t(values.size())}));
    };
    EXPECT_EQ(first(f32), std::nullopt);
    EXPECT_EQ(first(bf16), std::nullopt);
    for (size_t i = size_t(count); i-- > 0;) {
      const float bad = i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                                   : -std::numeric_limits<float>::infinity();
      f32[i] = bad, bf16[i] = BFloat16::from_float(bad);
      EXPECT_EQ(first(f32), i) << count;
      EXPECT_EQ(first(bf16), i) << count;
    }
  }
}

/// A line of /proc/self/status, in bytes.
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) << 10;
  }
  return -1;
}

/// Writes a folder of matrices in bf16 without a file of f32 on the way.
void write_bf16_folder(const std::string& folder, const ModelConfig& config) {
  std::filesystem::create_directories(folder);
  write_file(folder + "/config.json", to_json(config));
  std::vector<SafetensorsWriter::Spec> specs;
  for (const Parameter& p : ModelLayout(config, 1, 0).parameters) {
    specs.push_back({p.name, DType::bf16, p.shape});
  }
  SafetensorsWriter writer(folder + "/model.safetensors", specs);
  for (const auto& spec : specs) {
    std::vector<BFloat16> values(1);
    for (const int64_t extent : spec.shape) values.resize(values.size() * size_t(extent));
    for (size_t i = 0; i < values.size(); ++i) values[i] = BFloat16{uint16_t(0x3c00 + i % 113)};
    writer.write(std::as_bytes(std::span(values)));
  }
  writer.finish();
}

TEST(InferenceWeights, AreHeldOnceAlsoWhileTheyAreRead) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  if (!(std::ofstream("/proc/self/clear_refs") << 5 << std::flush)) GTEST_SKIP() << "no peaks";
  ModelConfig config = small_model(kVariants[1]);
  config.vocab = 257;
  config.hidden = 768;
  config.heads = config.kv_heads = 12;
  config.head_dim = 64;
  config.ffn = 2304;
  const std::string folder = make_scratch_folder("held");
  write_bf16_folder(folder, config);
  const auto parameters = double(config.parameters());
  const double matrix = 4.0 * 2 * 2304 * 768;  // the largest matrix in f32, with coded weights
  struct Case {
    EngineOptions options;
    double weights, more;
  };
  for (const Case& each : {Case{{.dtype = DType::bf16}, 2 * parameters, 0},
                           Case{{.dtype = DType::f32}, 4 * parameters, 0},
                           Case{{.weights = WeightFormat::int8}, 1.03125 * parameters, matrix},
                           Case{{.weights = WeightFormat::e4m3}, 1.03125 * parameters, matrix}}) {
    for (const bool reads : {true, false}) {
      if (!reads && each.options.dtype != DType::bf16) continue;
      const WeightFiles files(folder);
      run_threads({}, [&](Communicator& tp) {
        const int64_t before = status_bytes("VmRSS");
        std::ofstream("/proc/self/clear_refs") << 5 << std::flush;
        Engine engine(tp, config, each.options);
        reads ? read_weights(engine, files) : engine.initialize(1);
        const auto grown = double(status_bytes("VmHWM") - before);
        const auto weight_bytes = double(engine.weight_bytes());
        constexpr double kBuffers = 24 << 20;  // of threads, and of the engine itself
        EXPECT_LT(weight_bytes, 1.05 * each.weights);
        EXPECT_GT(weight_bytes, 0.99 * each.weights);
        EXPECT_LT(grown, 1.05 * each.weights + each.more + kBuffers) << reads;
        EXPECT_GT(grown, 0.8 * each.weights) << reads;
      });
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tandem
