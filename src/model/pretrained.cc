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
    const LocalPart part = local_part(p);
    if (part.columns == part.whole_columns && part.row_stride == part.columns) {  // side by side
      file.read_f32(entry, part.first,
                    values.subspan(size_t(p.offset), size_t(part.rows * part.columns)));
      continue;
    }
    for (int64_t row = 0; row < part.rows && part.columns > 0; ++row) {
      file.read_f32(entry, part.first + row * part.whole_columns,
                    values.subspan(size_t(p.offset + row * part.row_stride), size_t(part.columns)));
    }
  }
}

}  // namespace tandem
