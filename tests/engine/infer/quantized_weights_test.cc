// Models whose matrices are e4m3 codes with scales, against the same weights dequantized before.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "core/system/files.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/model/layout.h"
#include "engine/model/pretrained.h"
#include "tandem/error.h"
#include "tests/engine/infer/quantized_folder.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

/// Models of three families, whose ranks' shards begin within blocks.
std::vector<Json> model_configs() {
  std::vector<Json> all;
  for (const FamilyCase& each : family_cases()) {
    if (each.name != "qwen3, form 5" && each.name != "mixtral, form 4" &&
        each.name != "qwen3_moe, form 5") {
      continue;
    }
    all.push_back(each.expected["config"]);
    all.back()["intermediate_size"] = 46;
  }
  EXPECT_EQ(all.size(), 3u);
  return all;
}

/// Dense, with the matrix kMatrix.
Json dense_config() {
  for (const Json& each : model_configs()) {
    if (each["model_type"] == "qwen3") return each;
  }
  ADD_FAILURE();
  return {};
}

std::vector<float> load_shard(const StoredModel& stored, const ModelLayout& layout) {
  std::vector<float> values(size_t(layout.size));
  load_parameters(stored.weights, layout.parameters, {}, flat(values));
  return values;
}

/// Losses of all positions on `ranks` ranks, by rank.
std::vector<double> losses(const StoredModel& stored, int ranks) {
  const int64_t count = 12;
  const Batch batch = make_batch(stored.config, count);
  std::vector<double> found(static_cast<size_t>(ranks));
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, [&](Communicator& tp) {
    set_kernel_threads(1);
    Transformer model(tp, stored.config, {.batch = 1, .seq = count});
    load_parameters(stored.weights, model.parameter_list(), model.exec(), model.parameters());
    model.parameters_changed();
    found[size_t(tp.rank())] = model.forward(batch.tokens, batch.targets);
  });
  return found;
}

TEST(QuantizedWeights, EveryRankHasTheDequantizedValuesAndLosses) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const std::string folder = make_scratch_folder("quantized");
  const std::vector<Json> configs = model_configs();
  for (const QuantizedCase& test : quantized_cases()) {
    for (const Json& config : configs) {
      write_quantized_folder(folder, config, test);
      std::string notes;
      const auto note = [&](const std::string& text) { notes += text + "\n"; };
      const StoredModel stored = open_model(folder, note);
      EXPECT_THAT(notes, HasSubstr("config.json: keys without effect: quantization_config."));
      const StoredModel dequantized = open_model(folder + "/values", note);
      EXPECT_EQ(stored.config, dequantized.config);
      for (const int tp : {1, 2}) {
        for (int rank = 0; rank < tp; ++rank) {
          const ModelLayout layout(stored.config, tp, rank);
          EXPECT_EQ(load_shard(stored, layout), load_shard(dequantized, layout))
              << test.name << " rank " << rank << " of " << tp;
        }
        EXPECT_EQ(losses(stored, tp), losses(dequantized, tp)) << test.name << " tp " << tp;
      }
    }
  }
  std::filesystem::remove_all(folder);
}

/// Folder of one case, whose files tests change.
class RefusedWeights : public ::testing::Test {
 protected:
  RefusedWeights() : folder_(make_scratch_folder("refused")) {}
  ~RefusedWeights() override { std::filesystem::remove_all(folder_); }

  void write(const QuantizedCase& test) {
    write_quantized_folder(folder_, dense_config(), test);
    config_ = Json::parse(read_file(folder_ + "/config.json"));
  }
  void write(const char* name) {
    for (const QuantizedCase& each : quantized_cases()) {
      if (each.name == name) return write(each);
    }
    FAIL() << name;
  }
  /// Error of the model, after the folder's name.
  std::string error() const {
    try {
      open_model(folder_, [](const std::string&) {});
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.rfind(folder_, 0), 0u) << text;
      return text.substr(folder_.size() + 1);
    }
    return "accepted";
  }
  /// Error with another value in quantization_config, at a JSON pointer.
  std::string error_with(const std::string& pointer, const Json& value) const {
    Json root = config_;
    root["quantization_config"][Json::json_pointer(pointer)] = value;
    write_file(folder_ + "/config.json", root.dump());
    return error();
  }
  /// Rewrites tensors of the file: `change` returns false for one to leave out.
  template <typename Change>
  void rewrite(const Change& change) const {
    const std::string path = folder_ + "/model.safetensors";
    std::vector<SafetensorsWriter::Spec> specs;
    std::vector<std::vector<std::byte>> bytes;
    {
      const SafetensorsFile file(path);
      for (const SafetensorsEntry& entry : file.entries()) {
        SafetensorsWriter::Spec spec{entry.name, entry.dtype, entry.shape};
        std::vector<std::byte> data = file.data(entry);
        if (!change(spec, data)) continue;
        specs.push_back(spec), bytes.push_back(data);
      }
    }
    std::filesystem::remove(path);
    SafetensorsWriter writer(path, specs);
    for (const auto& each : bytes) writer.write(each);
    writer.finish();
  }

  std::string folder_;
  Json config_;
};

constexpr const char* kMatrix = "model.layers.0.mlp.down_proj.weight";  // 32 x 46

TEST_F(RefusedWeights, UnknownQuantizationIsNamed) {
  write("odd_blocks");
  EXPECT_EQ(error(), "accepted");
  EXPECT_EQ(error_with("/quant_method", "gptq"),
            "config.json: quantization_config.quant_method = \"gptq\": expected \"fp8\", "
            "\"fbgemm_fp8\", \"mxfp4\" or \"compressed-tensors\"");
  EXPECT_EQ(error_with("/quant_method", nullptr),
            "config.json: quantization_config.quant_method = null: expected \"fp8\", "
            "\"fbgemm_fp8\", \"mxfp4\" or \"compressed-tensors\"");
  EXPECT_EQ(error_with("/fmt", "e5m2"),
            "config.json: quantization_config.fmt = \"e5m2\": expected \"e4m3\"");
  EXPECT_EQ(error_with("/kv_cache_scheme", Json{{"num_bits", 8}}),
            "config.json: unknown key quantization_config.kv_cache_scheme");
  for (const Json& block : {Json(128), Json{128}, Json{0, 128}, Json{128, -1}, Json{1.5, 2},
                            Json{1, int64_t{1} << 40}, Json{1, 2, 3}}) {
    EXPECT_THAT(error_with("/weight_block_size", block),
                HasSubstr("weight_block_size = " + block.dump() +
                          ": expected [rows, columns] of at least 1"));
  }
  write("compressed_blocks");
  EXPECT_EQ(error(), "accepted");
  const std::string weights = "/config_groups/group_0/weights/";
  EXPECT_THAT(error_with(weights + "num_bits", 4),
              HasSubstr("config_groups.group_0.weights.num_bits = 4: expected 8"));
  EXPECT_THAT(error_with(weights + "type", "int"), HasSubstr("type = \"int\": expected \"float\""));
  EXPECT_THAT(error_with(weights + "symmetric", false), HasSubstr("symmetric = false: expected"));
  EXPECT_THAT(error_with(weights + "strategy", "group"), HasSubstr("strategy = \"group\": exp"));
  EXPECT_THAT(error_with(weights + "strategy", "channel"),
              HasSubstr("block_structure = [3,16]: expected null"));
  EXPECT_THAT(error_with(weights + "group_size", 64), HasSubstr("unknown key"));
  EXPECT_THAT(error_with("/format", "pack-quantized"), HasSubstr("format = \"pack-quantized\""));
  EXPECT_THAT(error_with("/config_groups", Json::object()), HasSubstr("config_groups = {}"));
  Json other = config_["quantization_config"]["config_groups"]["group_0"];
  other["weights"]["block_structure"] = {4, 16};
  EXPECT_THAT(error_with("/config_groups/group_1", other),
              HasSubstr("expected the blocks of the group before"));
}

TEST_F(RefusedWeights, ScalesOfOtherShapesAreNamed) {
  write("odd_blocks");
  const std::string scales = std::string(kMatrix) + "_scale_inv";
  const std::string expected =
      fmt::format("f32, bf16 or f16 [7, 7], the scales of '{}' in blocks of 5 x 7", kMatrix);
  rewrite([&](auto& spec, auto& data) {
    if (spec.name == scales) spec.shape = {6, 7}, data.resize(6 * 7 * sizeof(float));
    return true;
  });
  EXPECT_EQ(error(), fmt::format("model.safetensors: tensor '{}': f32 [6, 7]: expected {}", scales,
                                 expected));
  rewrite([&](auto& spec, auto&) { return spec.name != scales; });
  EXPECT_EQ(error(), fmt::format("model.safetensors: tensor '{}' is missing: expected {}", scales,
                                 expected));
  EXPECT_THAT(error_with("/weight_block_size", Json{128, 128}), HasSubstr("expected f32, bf16"));
  write("odd_blocks");
  rewrite([&](auto& spec, auto&) {
    if (spec.name == scales) spec.dtype = DType::i32;
    return true;
  });
  EXPECT_THAT(error(), HasSubstr(fmt::format("'{}': i32 [7, 7]: expected {}", scales, expected)));
  write("channels");
  rewrite([&](auto& spec, auto& data) {
    if (spec.name == std::string(kMatrix) + "_scale") spec.shape = {31, 1}, data.resize(31 * 2);
    return true;
  });
  EXPECT_EQ(error(),
            fmt::format("model.safetensors: tensor '{0}_scale': bf16 [31, 1]: expected f32, "
                        "bf16 or f16 [32, 1] or [1], the scales of '{0}'",
                        kMatrix));
}

TEST_F(RefusedWeights, CodesNeedAQuantizationAndScalesNeedCodes) {
  write("odd_blocks");
  Json root = config_;
  root.erase("quantization_config");
  write_file(folder_ + "/config.json", root.dump());
  EXPECT_THAT(
      error(),
      HasSubstr("q_proj.weight': e4m3 [128, 32]: expected f32, bf16 or f16, or a matrix and "
                "quantization_config in "));
  write("odd_blocks");
  rewrite([&](auto& spec, auto& data) {
    if (spec.name == kMatrix) spec.dtype = DType::f32, data.resize(4 * data.size());
    return true;
  });
  EXPECT_THAT(error(), HasSubstr(fmt::format("tensor '{}_scale_inv' is not read", kMatrix)));
  write("odd_blocks");
  rewrite([&](auto& spec, auto& data) {
    if (spec.name == "model.norm.weight") spec.dtype = DType::e4m3, data.resize(data.size() / 4);
    return true;
  });
  EXPECT_THAT(error(), HasSubstr("tensor 'model.norm.weight': e4m3 [32]: expected"));
}

TEST_F(RefusedWeights, NonFiniteValuesAreNamed) {
  const auto load_error = [&] {
    const StoredModel stored = open_model(folder_, [](const std::string&) {});
    try {
      load_shard(stored, ModelLayout(stored.config, 1, 0));
    } catch (const IoError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  write("odd_blocks");
  EXPECT_EQ(load_error(), "accepted");
  rewrite([&](auto& spec, auto& data) {
    const float bad = -INFINITY;
    if (spec.name == std::string(kMatrix) + "_scale_inv") std::memcpy(&data[4 * 5], &bad, 4);
    return true;
  });
  EXPECT_THAT(load_error(), HasSubstr(fmt::format(
                                "'{}_scale_inv': element 5 is -inf: expected finite", kMatrix)));
  write("odd_blocks");
  rewrite([&](auto& spec, auto& data) {
    if (spec.name == kMatrix) data[9] = std::byte{0x7F};
    return true;
  });
  EXPECT_THAT(load_error(), HasSubstr(fmt::format("'{}': element 9 is nan", kMatrix)));
}

TEST(QuantizedWeights, IdentityChangesWithTheBlocks) {
  const std::string folder = make_scratch_folder("identity");
  write_quantized_folder(folder, dense_config(), quantized_cases().front());
  const auto identity = [&] { return open_model(folder, [](const std::string&) {}).identity; };
  const std::string before = identity();
  Json config = Json::parse(read_file(folder + "/config.json"));
  config["quantization_config"]["weight_block_size"] = {129, 128};
  write_file(folder + "/config.json", config.dump());
  EXPECT_NE(identity(), before);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tandem
