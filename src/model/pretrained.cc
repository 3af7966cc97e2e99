#include "model/pretrained.h"

#include <fmt/format.h>

#include <filesystem>

#include "core/files.h"
#include "tandem/error.h"

namespace tandem {

std::string model_directory(const std::string& directory) {
  for (const std::string& candidate : {directory, directory + "/final"}) {
    if (path_exists(candidate + "/config.json")) return candidate;
  }
  throw IoError(fmt::format("{}: no config.json in it or in its final/: expected a trained model",
                            directory));
}

ModelConfig load_model_config(const std::string& directory) {
  const std::string path = directory + "/config.json";
  return model_config_from_json(read_file(path), path);
}

std::string model_identity(const ModelConfig& config, const SafetensorsFile& weights) {
  return fmt::format("config {}, weights {}", content_hash(to_json(config)), weights.identity());
}

void load_parameters(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                     std::span<float> values) {
  for (const Parameter& p : parameters) {
    const SafetensorsEntry& entry = file.require(p.name, p.shape);
    if (p.shard_dim < 0) {
      file.read_f32(entry, 0, values.subspan(size_t(p.offset), size_t(p.count)));
      continue;
    }
    if (p.count == 0) continue;  // another rank's
    const bool by_rows = p.shard_dim == 0;
    const int64_t rows = by_rows ? p.count : p.shape[0], columns = by_rows ? p.shape[1] : p.count;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t whole = by_rows ? (p.begin + row) * p.shape[1] : row * p.shape[1] + p.begin;
      file.read_f32(entry, whole,
                    values.subspan(size_t(p.offset + row * p.row_stride), size_t(columns)));
    }
  }
}

}  // namespace tandem
