#include "tests/engine/infer/families.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <span>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/model/fused_tensors.h"
#include "engine/model/layout.h"

namespace tandem::test {
namespace {
using Json = nlohmann::ordered_json;

constexpr uint64_t kFnvOffset = 0xCBF29CE484222325, kFnvPrime = 0x100000001B3;

}  // namespace

float weight(const std::string& name, uint64_t index) {
  uint64_t x = kFnvOffset;
  for (const char c : name) x = (x ^ uint8_t(c)) * kFnvPrime;
  x += (index + 1) * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  const int k = int((x ^ (x >> 31)) >> 57) - 64;
  if (name.ends_with("norm.weight")) return 1 + float(k >> 1) / 64;
  for (const char* text : {"embed_tokens", "lm_head", "gate.weight", ".bias"}) {
    if (name.find(text) != std::string::npos) return float(k) / 64;
  }
  return float(k) / 256;
}

namespace {

template <typename T>
std::vector<std::byte> to_bytes(const std::vector<float>& values) {
  std::vector<T> rounded;
  for (const float x : values) {
    if constexpr (std::is_same_v<T, float>) {
      rounded.push_back(x);
    } else {
      rounded.push_back(T::from_float(x));
      EXPECT_EQ(rounded.back().to_float(), x);
    }
  }
  const auto bytes = std::as_bytes(std::span(rounded));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> weight_bytes(const SafetensorsWriter::Spec& spec) {
  int64_t elements = 1;
  for (const int64_t extent : spec.shape) elements *= extent;
  std::vector<float> values;
  for (int64_t i = 0; i < elements; ++i) values.push_back(weight(spec.name, uint64_t(i)));
  if (spec.dtype == DType::bf16) return to_bytes<BFloat16>(values);
  return spec.dtype == DType::f16 ? to_bytes<Float16>(values) : to_bytes<float>(values);
}

}  // namespace

void write_folder(const std::string& folder, const Json& config, DType dtype, size_t files) {
  std::filesystem::create_directories(folder);
  write_file(folder + "/config.json", config.dump());
  const ModelConfig model = model_config_from_json(config.dump(), "config.json");
  std::vector<std::vector<SafetensorsWriter::Spec>> shards(files);
  size_t next = 0;
  for (const StoredParameters& p : stored_parameters(model, ModelLayout(model, 1, 0).parameters)) {
    shards[next++ % files].push_back({p.name, dtype, p.shape});
  }
  Json map;
  for (size_t i = 0; i < files; ++i) {
    const std::string name =
        files == 1 ? "model.safetensors" : fmt::format("model-{}-of-{}.safetensors", i + 1, files);
    SafetensorsWriter writer(folder + "/" + name, shards[i]);
    for (const auto& spec : shards[i]) {
      writer.write(weight_bytes(spec));
      map[spec.name] = name;
    }
    writer.finish();
  }
  if (files > 1) {
    write_file(folder + "/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  }
}

std::vector<FamilyCase> family_cases() {
  std::vector<FamilyCase> all;
  const Json root = Json::parse(read_file(TANDEM_TEST_FAMILIES "/models.json"));
  for (const auto& [name, expected] : root.items()) all.push_back({name, expected});
  return all;
}

std::string make_scratch_folder(const std::string& name) {
  const std::string path = ::testing::TempDir() + "tandem_" + name + std::to_string(getpid());
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

}  // namespace tandem::test
