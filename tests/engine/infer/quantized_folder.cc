#include "tests/engine/infer/quantized_folder.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/model/layout.h"

namespace tandem::test {
namespace {

using Json = nlohmann::ordered_json;

struct Written {
  SafetensorsWriter::Spec spec;
  std::vector<std::byte> bytes;
};

template <typename T>
std::vector<std::byte> copy_bytes(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

Written make_scales(const std::string& name, const std::vector<int64_t>& shape,
                    const QuantizedCase& test, std::vector<float>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::ldexp(1 + float(std::abs(weight(name, i))), -int(i % 5));
  }
  if (test.scales == DType::f32) return {{name, DType::f32, shape}, copy_bytes(values)};
  std::vector<BFloat16> rounded;
  for (float& value : values) {
    rounded.push_back(BFloat16::from_float(value));
    value = rounded.back().to_float();
  }
  return {{name, DType::bf16, shape}, copy_bytes(rounded)};
}

bool has_codes(const Parameter& p) {
  return p.shape.size() == 2 && p.name.find("model.layers.") == 0 &&
         !p.name.ends_with("gate.weight");
}

void write_file_of(const std::string& path, const std::vector<Written>& tensors) {
  std::vector<SafetensorsWriter::Spec> specs;
  for (const Written& each : tensors) specs.push_back(each.spec);
  SafetensorsWriter writer(path, specs);
  for (const Written& each : tensors) writer.write(each.bytes);
  writer.finish();
}

}  // namespace

std::vector<QuantizedCase> quantized_cases() {
  const auto blocks = [](int64_t rows, int64_t columns) {
    return fmt::format(R"({{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                           "weight_block_size": [{}, {}], "modules_to_not_convert": ["lm_head"]}})",
                       rows, columns);
  };
  const auto group = [](const char* strategy, const char* block) {
    return fmt::format(
        R"({{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "quantization_status": "compressed", "kv_cache_scheme": null, "config_groups":
            {{"group_0": {{"targets": ["Linear"], "input_activations": {{"num_bits": 8}},
            "output_activations": null, "weights": {{"num_bits": 8, "type": "float",
            "symmetric": true, "dynamic": false, "strategy": "{}", "block_structure": {}}}}}}}}})",
        strategy, block);
  };
  return {{"blocks_of_128", blocks(128, 128), 128, 128, true, DType::f32, "_scale_inv"},
          {"odd_blocks", blocks(5, 7), 5, 7, true, DType::f32, "_scale_inv"},
          {"flat_blocks", blocks(1, 8), 1, 8, true, DType::bf16, "_scale_inv"},
          {"tensors", R"({"quant_method": "fp8", "activation_scheme": "static"})", 0, 0, false,
           DType::f32, "_scale"},
          {"fbgemm", R"({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})", 1, 0},
          {"channels", group("channel", "null"), 1, 0, true, DType::bf16},
          {"vectors", group("channel", "null"), 1, 0, false},
          {"compressed_blocks", group("block", "[3, 16]"), 3, 16}};
}

void write_quantized_folder(const std::string& folder, Json config, const QuantizedCase& test) {
  const std::string values_folder = folder + "/values";
  std::filesystem::create_directories(values_folder);
  write_file(values_folder + "/config.json", config.dump());
  const ModelConfig model = model_config_from_json(config.dump(), "config.json");
  config["quantization_config"] = Json::parse(test.config);
  write_file(folder + "/config.json", config.dump());
  std::vector<Written> stored, values;
  for (const Parameter& p : ModelLayout(model, 1, 0).parameters) {
    const int64_t columns = p.shape.back(), rows = p.shape.size() > 1 ? p.shape[0] : 1;
    std::vector<float> exact;
    for (int64_t i = 0; i < rows * columns; ++i) exact.push_back(weight(p.name, uint64_t(i)));
    if (!has_codes(p)) {
      const Written tensor{{p.name, DType::f32, p.shape}, copy_bytes(exact)};
      stored.push_back(tensor), values.push_back(tensor);
      continue;
    }
    const int64_t height = test.block_rows > 0 ? test.block_rows : rows,
                  width = test.block_columns > 0 ? test.block_columns : columns,
                  grid_rows = (rows + height - 1) / height,
                  grid_columns = (columns + width - 1) / width;
    std::vector<int64_t> shape{grid_rows, grid_columns};
    if (!test.has_columns) shape.pop_back();
    std::vector<float> scales(size_t(grid_rows * grid_columns));
    const Written of_scales = make_scales(p.name + test.suffix, shape, test, scales);
    std::vector<Float8E4M3> codes;
    for (int64_t i = 0; i < rows * columns; ++i) {
      codes.push_back(Float8E4M3::from_float(exact[size_t(i)]));
      const int64_t block = i / columns / height * grid_columns + i % columns / width;
      exact[size_t(i)] = codes.back().to_float() * scales[size_t(block)];
    }
    stored.push_back({{p.name, DType::e4m3, p.shape}, copy_bytes(codes)});
    stored.push_back(of_scales);
    if (test.name == "tensors") {
      stored.push_back({{p.name.substr(0, p.name.rfind('.')) + ".input_scale", DType::f32, {1}},
                        copy_bytes(std::vector<float>{1})});
    }
    values.push_back({{p.name, DType::f32, p.shape}, copy_bytes(exact)});
  }
  write_file_of(folder + "/model.safetensors", stored);
  write_file_of(values_folder + "/model.safetensors", values);
}

}  // namespace tandem::test
