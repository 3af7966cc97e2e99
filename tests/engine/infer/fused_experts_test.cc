// Experts that are fused tensors on disk, in bf16 or in blocks of MXFP4, and written as such.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "core/system/files.h"
#include "engine/checkpoint/fuse_experts.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/model/fused_tensors.h"
#include "engine/model/layout.h"
#include "engine/model/pretrained.h"
#include "engine/model/weights.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/infer/families.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;
using Specs = std::vector<SafetensorsWriter::Spec>;
using Bytes = std::vector<std::vector<std::byte>>;

Json gpt_oss_config() {
  for (const FamilyCase& each : family_cases()) {
    if (each.name == "gpt_oss, form 5") return each.expected["config"];
  }
  ADD_FAILURE();
  return {};
}

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t extent : shape) elements *= extent;
  return elements;
}

/// Number of e2m1: a sign, an exponent of two bits and a bit of mantissa.
float e2m1(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const double size = exponent == 0 ? 0.5 * mantissa : std::ldexp(1 + 0.5 * mantissa, exponent - 1);
  return float(code & 8 ? -size : size);
}

/// Byte of a tensor of blocks or of scales.
uint8_t stored_byte(const std::string& name, int64_t index) {
  const uint32_t word = philox(5, stream_of(name.c_str()), uint64_t(index))[0];
  return name.ends_with("_scales") ? uint8_t(117 + word % 8) : uint8_t(word);
}

struct Tensors {
  Specs specs;
  Bytes bytes;

  template <typename T, typename Make>
  void add(const std::string& name, DType dtype, const std::vector<int64_t>& shape, Make&& make) {
    specs.push_back({name, dtype, shape});
    std::vector<T> values;
    for (int64_t i = 0; i < elements_of(shape); ++i) values.push_back(make(i));
    const auto all = std::as_bytes(std::span(values));
    bytes.emplace_back(all.begin(), all.end());
  }
  void write(const std::string& folder, const Json& config) const {
    std::filesystem::create_directories(folder);
    write_file(folder + "/config.json", config.dump());
    SafetensorsWriter writer(folder + "/model.safetensors", specs);
    for (const auto& each : bytes) writer.write(each);
    writer.finish();
  }
};

/// Model's tensors, those of experts' matrices in blocks, or in bf16 what these decode to.
Tensors make_tensors(const ModelConfig& config, bool has_blocks) {
  Tensors all;
  for (const StoredParameters& p :
       stored_parameters(config, ModelLayout(config, 1, 0).parameters)) {
    const std::string &name = p.name, blocks = name + "_blocks", scales = name + "_scales";
    if (!name.ends_with("gate_up_proj") && !name.ends_with("experts.down_proj")) {
      all.add<BFloat16>(name, DType::bf16, p.shape,
                        [&](int64_t i) { return BFloat16::from_float(weight(name, uint64_t(i))); });
      continue;
    }
    const int64_t in = p.shape[1], out = p.shape[2], groups = in / 32;
    if (has_blocks) {
      all.add<uint8_t>(blocks, DType::u8, {p.shape[0], out, groups, 16},
                       [&](int64_t i) { return stored_byte(blocks, i); });
      all.add<uint8_t>(scales, DType::u8, {p.shape[0], out, groups},
                       [&](int64_t i) { return stored_byte(scales, i); });
      continue;
    }
    all.add<BFloat16>(name, DType::bf16, p.shape, [&](int64_t i) {
      const int64_t expert = i / (in * out), k = i / out % in, row = i % out;
      const int64_t element = (expert * out + row) * in + k;
      const int byte = stored_byte(blocks, element / 2);
      const int scale = stored_byte(scales, element / 32);
      const float value = e2m1(element % 2 == 0 ? byte & 15 : byte >> 4);
      return BFloat16::from_float(std::ldexp(value, scale - 127));
    });
  }
  return all;
}

StoredModel open_folder(const std::string& folder) {
  return open_model(folder, [](const std::string& text) { ADD_FAILURE() << text; });
}

/// Shards of a rank, in f32 and, rounded, from weights in bf16.
std::vector<std::vector<float>> load_shards(const StoredModel& stored, const ModelLayout& layout) {
  std::vector<std::vector<float>> all(2, std::vector<float>(size_t(layout.size)));
  load_parameters(stored.weights, layout.parameters, {}, flat(all[0]));
  const Weights weights(Exec{}, layout, DType::bf16, false);
  load_parameters(stored.weights, layout.parameters, {}, weights.views());
  weights.read(flat(all[1]));
  return all;
}

TEST(FusedExperts, BlocksAreDecodedOnEveryRank) {
  const std::string folder = make_scratch_folder("mxfp4"), values = folder + "/values";
  Json config = gpt_oss_config();
  const ModelConfig model = model_config_from_json(config.dump(), "config.json");
  make_tensors(model, false).write(values, config);
  config["quantization_config"] = {{"quant_method", "mxfp4"},
                                   {"modules_to_not_convert", {"lm_head"}}};
  make_tensors(model, true).write(folder, config);
  const StoredModel blocks = open_folder(folder), decoded = open_folder(values);
  EXPECT_EQ(blocks.config, decoded.config);
  for (const auto& [tp, ep] : {std::pair{1, 1}, {2, 1}, {4, 2}, {1, 8}}) {
    for (int rank = 0; rank < tp * ep; ++rank) {
      const ModelLayout layout(model, tp, rank % tp, {ep, rank / tp});
      const auto found = load_shards(blocks, layout), expected = load_shards(decoded, layout);
      EXPECT_EQ(found, expected) << "tp " << tp << ", ep " << ep << ", rank " << rank;
      double size = 0;
      for (const float x : found[0]) size += std::abs(double(x));
      EXPECT_GT(size, 100);
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(FusedExperts, TensorsAreChecked) {
  const std::string folder = make_scratch_folder("mxfp4_errors");
  const Json config = gpt_oss_config();
  const ModelConfig model = model_config_from_json(config.dump(), "config.json");
  const std::string experts = "model.layers.1.mlp.experts.";
  const auto error_with = [&](bool has_blocks, const std::string& name,
                              const std::function<void(Tensors&, size_t)>& change) -> std::string {
    std::filesystem::remove_all(folder);
    Tensors tensors = make_tensors(model, has_blocks);
    for (size_t i = 0; i < tensors.specs.size(); ++i) {
      if (tensors.specs[i].name != name) continue;
      change(tensors, i);
      break;
    }
    tensors.write(folder, config);
    try {
      open_folder(folder);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto erase = [](Tensors& t, size_t i) {
    t.specs.erase(t.specs.begin() + int64_t(i)), t.bytes.erase(t.bytes.begin() + int64_t(i));
  };
  const auto shorten = [](Tensors& t, size_t i) {
    const size_t first = size_t(t.specs[i].shape[0]--);
    t.bytes[i].resize(t.bytes[i].size() / first * (first - 1));
  };
  EXPECT_EQ(error_with(true, "", erase), "accepted");
  EXPECT_THAT(error_with(true, experts + "gate_up_proj_scales", erase),
              HasSubstr("model.safetensors: tensor 'model.layers.1.mlp.experts.gate_up_proj_scales'"
                        " is missing: expected u8 model.layers.1.mlp.experts.gate_up_proj_scales "
                        "[8, 128, 2]"));
  EXPECT_THAT(error_with(true, experts + "down_proj_blocks", erase),
              HasSubstr("tensor 'model.layers.1.mlp.experts.down_proj_blocks' is missing"));
  EXPECT_THAT(error_with(true, experts + "down_proj_blocks", shorten),
              HasSubstr("tensor 'model.layers.1.mlp.experts.down_proj_blocks': u8 [7, 64, 2, 16]: "
                        "expected u8 model.layers.1.mlp.experts.down_proj_blocks [8, 64, 2, 16]"));
  EXPECT_THAT(error_with(false, experts + "down_proj", shorten),
              HasSubstr("tensor 'model.layers.1.mlp.experts.down_proj': bf16 [7, 64, 64]: expected "
                        "f32, bf16 or f16 [8, 64, 64]"));
  EXPECT_THAT(
      error_with(false, experts + "gate_up_proj_bias", erase),
      HasSubstr("tensor 'model.layers.1.mlp.experts.gate_up_proj_bias' is missing: expected "
                "f32, bf16 or f16 [8, 128]"));
  EXPECT_THAT(
      error_with(false, experts + "gate_up_proj", erase),
      HasSubstr("tensor 'model.layers.1.mlp.experts.gate_up_proj' is missing: expected f32, "
                "bf16 or f16 [8, 64, 128], or u8 "
                "model.layers.1.mlp.experts.gate_up_proj_blocks [8, 128, 2, 16] and u8 "
                "model.layers.1.mlp.experts.gate_up_proj_scales [8, 128, 2]"));
  // An exponent of 255 is NaN.
  EXPECT_EQ(error_with(true, experts + "down_proj_scales",
                       [](Tensors& t, size_t i) { t.bytes[i][5] = std::byte{255}; }),
            "accepted");
  const StoredModel stored = open_folder(folder);
  const ModelLayout layout(model, 1, 0);
  std::vector<float> values(size_t(layout.size));
  try {
    load_parameters(stored.weights, layout.parameters, {}, flat(values));
    ADD_FAILURE();
  } catch (const IoError& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("scale 5 of tensor 'model.layers.1.mlp.experts.down_proj_scales' is NaN"));
  }
  std::filesystem::remove_all(folder);
}

TEST(FusedExperts, SeparateParametersAreFused) {
  const std::string folder = make_scratch_folder("fuse");
  const Json config = gpt_oss_config();
  const ModelConfig model = model_config_from_json(config.dump(), "config.json");
  const ModelLayout layout(model, 1, 0);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Tensors separate;
    for (const Parameter& p : layout.parameters) {
      const auto value = [&](int64_t i) { return weight(p.name, uint64_t(i)); };
      dtype == DType::f32 ? separate.add<float>(p.name, dtype, p.shape, value)
                          : separate.add<BFloat16>(p.name, dtype, p.shape, [&](int64_t i) {
                              return BFloat16::from_float(value(i));
                            });
    }
    separate.write(folder, config);
    const std::string path = folder + "/model.safetensors";
    const std::string hash = fuse_experts(path, model);
    const SafetensorsFile file(path);
    EXPECT_EQ(file.header_hash(), hash);
    file.verify(true);
    const std::string name = "model.layers.2.mlp.experts.";
    EXPECT_EQ(file.find(name + "5.up_proj.weight"), nullptr);
    const SafetensorsEntry& fused =
        file.require(name + "gate_up_proj", std::vector<int64_t>{8, 64, 128});
    EXPECT_EQ(fused.dtype, dtype);
    std::vector<float> values(size_t{8} * 64 * 128);
    file.read_f32(fused, 0, values);
    for (const auto& [row, in] : {std::pair{0, 0}, {63, 63}, {17, 40}}) {
      const size_t at = size_t((5 * 64 + in) * 128 + 2 * row);
      const auto index = uint64_t(row * 64 + in);
      EXPECT_EQ(values[at], weight(name + "5.gate_proj.weight", index));
      EXPECT_EQ(values[at + 1], weight(name + "5.up_proj.weight", index));
    }
    const StoredModel stored = open_folder(folder);
    std::vector<float> loaded(size_t(layout.size));
    load_parameters(stored.weights, layout.parameters, {}, flat(loaded));
    for (const Parameter& p : layout.parameters) {
      const LocalShard shard = local_shard(p);
      for (int64_t i = 0; i < shard.rows * shard.columns; ++i) {
        const int64_t at = i / shard.columns * shard.row_stride + i % shard.columns;
        ASSERT_EQ(loaded[size_t(p.offset + at)], weight(p.name, uint64_t(i))) << p.name;
      }
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tandem
