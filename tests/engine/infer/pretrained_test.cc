#include "engine/model/pretrained.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/model/initialize.h"
#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

std::string scratch_directory(const char* name) {
  const std::string path = ::testing::TempDir() + "tandem_" + name + std::to_string(getpid());
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

/// A model with the vocabulary of bytes.
template <typename... Kind>
ModelConfig byte_model(const Kind&... kind) {
  ModelConfig config = small_model(kind...);
  config.vocab = kBos + 1;
  return config;
}

/// Writes the whole model as one file, without tensor `skip`.
void write_model(const std::string& path, const ModelConfig& config, const std::string& skip = "",
                 uint64_t seed = 23) {
  const ModelLayout layout(config, 1, 0);
  std::vector<float> values(size_t(layout.size));
  initialize_parameters({}, layout, config, seed, flat(values));
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

void unexpected_note(const std::string& text) {
  ADD_FAILURE() << text;
}

TEST(Pretrained, EveryRankReadsItsShard) {
  const std::string directory = scratch_directory("shards");
  for (const Variant& variant : kVariants) {
    const ModelConfig config = byte_model(variant);
    write_file(directory + "/config.json", to_json(config));
    write_model(directory + "/model.safetensors", config);
    const StoredModel stored = open_model(directory, unexpected_note);
    EXPECT_EQ(stored.config, config);
    const WeightFiles& file = stored.weights;
    for (const int tp : {1, 2}) {
      for (int rank = 0; rank < tp; ++rank) {
        const ModelLayout layout(config, tp, rank);
        std::vector<float> read(size_t(layout.size)), expected(read.size());
        load_parameters(file, layout.parameters, {}, flat(read));
        initialize_parameters({}, layout, config, 23, flat(expected));
        EXPECT_EQ(read, expected) << variant.name << " rank " << rank << " of " << tp;
      }
    }
  }
  std::filesystem::remove_all(directory);
}

TEST(Pretrained, ErrorsNameTheCause) {
  const std::string directory = scratch_directory("errors");
  EXPECT_THROW(open_model(directory, unexpected_note), IoError);
  const ModelConfig config = byte_model();
  const std::string path = directory + "/model.safetensors";
  write_model(path, config, "model.norm.weight");
  const ModelLayout layout(config, 1, 0);
  std::vector<float> values(size_t(layout.size));
  try {
    load_parameters(SafetensorsFile(path), layout.parameters, {}, flat(values));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("model.norm.weight"), std::string::npos);
  }
  ModelConfig wider = config;
  wider.ffn += 2;
  const ModelLayout other(wider, 1, 0);
  values.resize(size_t(other.size));
  try {
    load_parameters(SafetensorsFile(path), other.parameters, {}, flat(values));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("gate_proj"), std::string::npos);
  }
  std::filesystem::remove_all(directory);
}

std::string error_of(const std::string& directory) {
  try {
    open_model(directory, unexpected_note);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

/// Writes the files that a training run saves.
void write_stored(const std::string& directory, const ModelConfig& config, int64_t step,
                  uint64_t seed = 23) {
  std::filesystem::create_directories(directory);
  const std::string path = directory + "/model.safetensors";
  write_model(path, config, "", seed);
  TrainState state;
  state.step = step;
  write_state(directory, state, config,
              {{"model.safetensors", SafetensorsFile(path).header_hash()}});
}

TEST(StoredModel, EditedAndSwappedFilesAreRefusedByName) {
  const std::string directory = scratch_directory("sealed"), other = scratch_directory("other");
  const ModelConfig config = byte_model();
  write_stored(directory, config, 5);
  write_stored(other, config, 6, 24);
  EXPECT_EQ(error_of(directory), "accepted");
  for (const std::string name : {"config.json", "model.safetensors", "state.json"}) {
    const std::string file = directory + "/" + name, good = read_file(file);
    std::string edited = good;
    const size_t key = name == "config.json" ? good.find("\"hidden_size\"") : 0;
    edited[good.find_first_of("0123456789", key)] = '7';
    for (const std::string& text : {edited, good.substr(0, good.size() - 3), std::string()}) {
      write_file(file, text);
      EXPECT_THAT(error_of(directory), ::testing::HasSubstr(file));
    }
    write_file(file, name == "config.json" ? good : read_file(other + "/" + name));
    EXPECT_EQ(error_of(directory) == "accepted", name == "config.json") << name;
    write_file(file, good);
  }
  // config.json rewritten by another program is still equivalent.
  write_file(directory + "/config.json", nlohmann::json::parse(to_json(config)).dump());
  EXPECT_EQ(error_of(directory), "accepted");
  std::filesystem::remove(directory + "/state.json");  // like a model of another origin
  EXPECT_EQ(error_of(directory), "accepted");
  std::filesystem::remove_all(directory);
  std::filesystem::remove_all(other);
}

/// Error of opening the model under another name, with config.json changed.
template <typename Change>
std::string error_with(const std::string& directory, const ModelConfig& config, Change&& change) {
  auto root = nlohmann::ordered_json::parse(to_json(config));
  change(root);
  write_file(directory + "/config.json", root.dump());
  return error_of(directory);
}

TEST(StoredModel, UnreadTensorsAreNamed) {
  const std::string directory = scratch_directory("unread");
  const ModelConfig config = byte_model();
  write_model(directory + "/model.safetensors", config);
  const auto with = [&](const char* key, const nlohmann::ordered_json& value) {
    return error_with(directory, config, [&](auto& root) { root[key] = value; });
  };
  EXPECT_EQ(with("num_hidden_layers", config.layers), "accepted");
  EXPECT_THAT(with("num_hidden_layers", config.layers - 1),
              ::testing::HasSubstr("model.layers." + std::to_string(config.layers - 1)));
  EXPECT_THAT(with("num_hidden_layers", 1 << 30), ::testing::HasSubstr("num_hidden_layers"));
  EXPECT_THAT(with("hidden_size", 1 << 30), ::testing::HasSubstr("model.embed_tokens.weight"));
  ASSERT_TRUE(config.tie_word_embeddings);
  EXPECT_THAT(with("tie_word_embeddings", false), ::testing::HasSubstr("'lm_head.weight' is miss"));

  ModelConfig untied = config;
  untied.tie_word_embeddings = false;
  write_model(directory + "/model.safetensors", untied);
  EXPECT_THAT(with("tie_word_embeddings", true),
              ::testing::HasSubstr("'lm_head.weight' is not read"));
  std::filesystem::remove_all(directory);
}

// Other programs write the embedding twice, and frequencies that are implied by rope_theta.
TEST(StoredModel, RedundantTensorsAreAllowed) {
  const std::string directory = scratch_directory("redundant");
  const ModelConfig config = byte_model();
  write_file(directory + "/config.json", to_json(config));
  write_model(directory + "/plain", config);
  const SafetensorsFile original(directory + "/plain");
  std::vector<SafetensorsWriter::Spec> specs;
  for (const auto& entry : original.entries())
    specs.push_back({entry.name, entry.dtype, entry.shape});
  specs.push_back({"lm_head.weight", DType::f32, {config.vocab, config.hidden}});
  specs.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", DType::f32, {1}});
  SafetensorsWriter writer(directory + "/model.safetensors", specs);
  for (const auto& entry : original.entries()) writer.write(original.data(entry));
  writer.write(original.data(*original.find("model.embed_tokens.weight")));
  writer.write(std::vector<std::byte>(4));
  writer.finish();
  EXPECT_EQ(error_of(directory), "accepted");
  std::filesystem::remove_all(directory);
}

TEST(StoredModel, OtherTokenizersAreRefused) {
  const std::string directory = scratch_directory("tokens");
  ModelConfig config = byte_model();
  config.vocab = 300;
  write_model(directory + "/model.safetensors", config);
  EXPECT_THAT(error_with(directory, config, [](auto&) {}),
              ::testing::HasSubstr("vocab_size = 300: expected 257"));
  write_stored(directory, config, 5);  // trained here: on bytes
  EXPECT_EQ(error_of(directory), "accepted");
  std::filesystem::remove_all(directory);
}

TEST(Pretrained, NaNWeightsAreNamed) {
  const std::string directory = scratch_directory("nan");
  const ModelConfig config = byte_model();
  write_model(directory + "/model.safetensors", config);
  const SafetensorsFile whole(directory + "/model.safetensors");
  const std::string name = "model.layers.0.mlp.down_proj.weight";
  SafetensorsWriter writer(directory + "/bad", {{name, DType::f32, whole.find(name)->shape}});
  std::vector<std::byte> bytes = whole.data(*whole.find(name));
  const float bad = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bytes.data() + 5 * sizeof bad, &bad, sizeof bad);
  writer.write(bytes);
  writer.finish();
  const ModelLayout layout(config, 1, 0);
  std::vector<float> values(size_t(layout.size));
  const auto one = std::ranges::find(layout.parameters, name, &Parameter::name);
  try {
    load_parameters(SafetensorsFile(directory + "/bad"), {*one}, {}, flat(values));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(name + "': element 5 is nan"));
  }
  std::filesystem::remove_all(directory);
}

TEST(StoredModel, CheckpointWithoutItsStateIsRefused) {
  const std::string out = scratch_directory("stateless");
  const std::string step = out + "/checkpoints/step-00000005";
  write_stored(step, byte_model(), 5);
  EXPECT_EQ(error_of(step + "/"), "accepted");
  std::filesystem::remove(step + "/state.json");
  EXPECT_THAT(error_of(step + "/"), ::testing::HasSubstr("state.json"));
  std::filesystem::remove_all(out);
}

TEST(StoredModel, NewestCheckpointOfATrainingIsOpened) {
  const std::string out = scratch_directory("newest");
  const std::string final = out + "/final", old = out + "/checkpoints/step-00000005",
                    later = out + "/checkpoints/step-00000009";
  std::string said;
  const auto chosen = [&] {
    said.clear();
    return open_model(out, [&](const std::string& text) { said += text; }).directory;
  };
  write_stored(old, byte_model(), 5);
  EXPECT_EQ(chosen(), old);
  EXPECT_THAT(said, ::testing::HasSubstr(old));
  write_stored(final, byte_model(), 5);
  EXPECT_EQ(chosen(), final);
  EXPECT_EQ(said, "");
  write_stored(later, byte_model(), 9, 24);
  EXPECT_EQ(chosen(), later);
  EXPECT_THAT(said, ::testing::HasSubstr("final is of step 5"));
  std::filesystem::remove(final + "/state.json");  // its step is unknown
  EXPECT_EQ(chosen(), final);
  EXPECT_THAT(said, ::testing::HasSubstr("other weights"));
  std::filesystem::remove_all(out);
}

}  // namespace
}  // namespace tandem
