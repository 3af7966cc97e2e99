// A toy model family: it names the keys of its config.json and its tensors differently from Llama.
// Two files add it, this one and CMakeLists.txt. `tandem generate` reads it after a change of two
// more: a row of kFormats in src/engine/model/config_json.cc with its keys, and its names in
// src/engine/model/program/layer.cc.
#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/formats/safetensors.h"
#include "engine/model/initialize.h"
#include "engine/model/pretrained.h"
#include "tests/engine/model/harness.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/flat.h"

namespace tandem::test {
namespace {

constexpr std::array<std::pair<const char*, const char*>, 7> kKeys{
    {{"n_vocab", "vocab_size"},
     {"n_embd", "hidden_size"},
     {"n_layer", "num_hidden_layers"},
     {"n_head", "num_attention_heads"},
     {"n_kv_head", "num_key_value_heads"},
     {"n_inner", "intermediate_size"},
     {"n_positions", "max_position_embeddings"}}};
constexpr std::array<std::pair<const char*, const char*>, 5> kNames{
    {{"model.layers.", "blocks."},
     {"self_attn.", "attn."},
     {"mlp.", "feed_forward."},
     {"model.embed_tokens.", "token_table."},
     {"model.norm.", "last_norm."}}};

ModelConfig toy_config(const std::string& json, const std::string& file) {
  const auto toy = nlohmann::json::parse(json);
  nlohmann::json llama = nlohmann::json::parse(to_json(ModelConfig{}));
  for (const auto& [from, to] : kKeys) llama[to] = toy.at(from);
  llama["head_dim"] = toy.at("n_embd").get<int64_t>() / toy.at("n_head").get<int64_t>();
  return model_config_from_json(llama.dump(), file);
}

std::string toy_name(std::string name) {
  for (const auto& [from, to] : kNames) {
    const size_t at = name.find(from);
    if (at != std::string::npos) name.replace(at, std::string_view(from).size(), to);
  }
  return name;
}

std::vector<Parameter> toy_parameters(std::vector<Parameter> list) {
  for (Parameter& each : list) each.name = toy_name(each.name);
  return list;
}

TEST(NewFamily, ItsConfigAndTensorsAreReadAtAnyLayout) {
  const ModelConfig config = toy_config(
      R"({"n_vocab": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_inner": 22,
          "n_positions": 16})",
      "toy");
  EXPECT_EQ(config.head_dim, 6);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_THROW(toy_config(R"({"n_vocab": 37, "n_embd": 24, "n_layer": 2, "n_head": 4,
                              "n_kv_head": 3, "n_inner": -22, "n_positions": 16})",
                          "toy"),
               ConfigError);

  // A checkpoint of that family.
  const ModelLayout layout(config, 1, 0);
  std::vector<float> values(size_t(layout.size));
  initialize_parameters({}, layout, config, 23, flat(values));
  Tensors whole;
  collect(toy_parameters(layout.parameters), values, whole);
  ASSERT_EQ(whole.count("blocks.1.attn.q_proj.weight"), 1u);
  ASSERT_EQ(whole.count("token_table.weight"), 1u);
  std::vector<SafetensorsWriter::Spec> specs;
  for (const Parameter& each : toy_parameters(layout.parameters)) {
    specs.push_back({each.name, DType::f32, each.shape});
  }
  const TempDir directory;
  const std::string path = directory / "model.safetensors";
  SafetensorsWriter writer(path, specs);
  for (const auto& spec : specs) writer.write(std::as_bytes(std::span(whole[spec.name])));
  writer.finish();

  const Batch batch = make_batch(config, 16);
  for (const int tp : {1, 2}) {
    WorldOptions world;
    world.ranks = tp;
    run_threads(world, [&](Communicator& comm) {
      set_kernel_threads(1);
      TransformerOptions options;
      options.seq = 16;
      Transformer named(comm, config, options), model(comm, config, options);
      named.initialize(23);
      load_parameters(SafetensorsFile(path), toy_parameters(model.parameter_list()), model.exec(),
                      model.parameters());
      model.parameters_changed();
      EXPECT_EQ(model.forward(batch.tokens, batch.targets),
                named.forward(batch.tokens, batch.targets));
    });
  }
}

}  // namespace
}  // namespace tandem::test
