#include "model/pretrained.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>

#include "core/files.h"
#include "model/layout.h"
#include "tandem/error.h"
#include "tests/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::testing;

std::string scratch_directory(const char* name) {
  const std::string path = ::testing::TempDir() + "tandem_" + name + std::to_string(getpid());
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

/// The whole model as one file, without `skip`.
void write_model(const std::string& path, const ModelConfig& config, const std::string& skip = "") {
  const ModelLayout layout(config, 1, 0);
  std::vector<float> values(size_t(layout.size));
  initialize_parameters(layout, config, 23, values);
  Tensors whole;
  collect(layout.parameters, values, whole);
  std::vector<SafetensorsWriter::Spec> specs;
  for (const Parameter& p : layout.parameters) {
    if (p.name != skip) specs.push_back({p.name, DType::f32, p.shape});
  }
  SafetensorsWriter writer(path, specs);
  for (const auto& spec : specs) writer.write(std::as_bytes(std::span(whole[spec.name])));
  writer.finish();
}

TEST(Pretrained, EveryShardReadsItsPart) {
  const std::string directory = scratch_directory("shards");
  for (const Variant& variant : kVariants) {
    const ModelConfig config = small_model(variant);
    write_file(directory + "/config.json", to_json(config));
    write_model(directory + "/model.safetensors", config);
    EXPECT_EQ(load_model_config(directory), config);
    const SafetensorsFile file(directory + "/model.safetensors");
    for (const int tp : {1, 2}) {
      for (int rank = 0; rank < tp; ++rank) {
        const ModelLayout layout(config, tp, rank);
        std::vector<float> read(size_t(layout.size)), expected(read.size());
        load_parameters(file, layout.parameters, read);
        initialize_parameters(layout, config, 23, expected);
        EXPECT_EQ(read, expected) << variant.name << " rank " << rank << " of " << tp;
      }
    }
  }
  std::filesystem::remove_all(directory);
}

TEST(Pretrained, ErrorsNameWhatIsWrong) {
  const std::string directory = scratch_directory("errors");
  EXPECT_THROW(model_directory(directory), IoError);
  std::filesystem::create_directories(directory + "/final");
  const ModelConfig config = small_model();
  write_file(directory + "/final/config.json", to_json(config));
  EXPECT_EQ(model_directory(directory), directory + "/final");

  const std::string path = directory + "/final/model.safetensors";
  write_model(path, config, "model.norm.weight");
  const ModelLayout layout(config, 1, 0);
  std::vector<float> values(size_t(layout.size));
  try {
    load_parameters(SafetensorsFile(path), layout.parameters, values);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("model.norm.weight"), std::string::npos);
  }
  ModelConfig wider = config;
  wider.ffn += 2;
  const ModelLayout other(wider, 1, 0);
  values.resize(size_t(other.size));
  try {
    load_parameters(SafetensorsFile(path), other.parameters, values);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("gate_proj"), std::string::npos);
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace tandem
