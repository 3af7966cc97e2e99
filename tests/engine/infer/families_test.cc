// Models of all families, against logits, tokens and losses that transformers computed
// (families/make.py). Weights are a function of tensor names, so that only results are stored.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/host_copy.h"
#include "core/system/files.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/infer/engine.h"
#include "engine/model/fused_tensors.h"
#include "engine/model/pretrained.h"
#include "engine/model/transformer.h"
#include "gemm/gemm.h"
#include "tests/engine/infer/families.h"
#include "tests/engine/infer/fed_text.h"
#include "tests/engine/infer/set_weights.h"
#include "tests/engine/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::test;
using Json = nlohmann::ordered_json;

const std::vector<int32_t> kPrompt = {256, 35,  105, 110, 99,  108, 117, 100, 101, 32,
                                      60,  115, 116, 100, 105, 111, 46,  104, 62,  10};

StoredModel open_folder(const std::string& folder) {
  return open_model(folder, [](const std::string& text) { ADD_FAILURE() << text; });
}

/// Every eighth logit is expected, to 1e-5 of the largest.
void expect_logits(const std::vector<float>& found, const Json& expected,
                   const std::string& where) {
  double largest = 0, worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = expected[i].get<double>();
    largest = std::max(largest, std::abs(value));
    worst = std::max(worst, std::abs(value - double(found[8 * i])));
  }
  EXPECT_LE(worst, 1e-5 * largest) << where;
}

void check_generation(Communicator& tp, const StoredModel& stored, const FamilyCase& test) {
  const std::string where = fmt::format("{}, tp {}", test.name, tp.size());
  FedText fed(tp, stored.config, {.block = 7});
  read_weights(fed, stored.weights);
  std::vector<float> logits = fed.feed(kPrompt);
  expect_logits(logits, test.expected["logits"], where);
  const auto expected = test.expected["tokens"].get<std::vector<int32_t>>();
  std::vector<int32_t> found;
  while (found.size() < expected.size()) {
    found.push_back(int32_t(std::ranges::max_element(logits) - logits.begin()));
    logits = fed.feed({&found.back(), 1});
  }
  EXPECT_EQ(found, expected) << where;
  fed.reset();  // every token on its own
  std::vector<int32_t> text = kPrompt;
  text.insert(text.end(), expected.begin(), expected.end());
  for (const int32_t token : text) logits = fed.feed({&token, 1});
  expect_logits(logits, test.expected["last_logits"], where + ", one token at a time");
}

/// Two texts in a batch, whose prompts are divided: their tokens, and the mean loss of both parts.
void check_engine(Communicator& tp, const StoredModel& stored, const FamilyCase& test) {
  const std::string where = fmt::format("{}, tp {}, in a batch", test.name, tp.size());
  const auto expected = test.expected["tokens"].get<std::vector<int32_t>>();
  Engine engine(tp, stored.config, {.sequences = 2, .rows = 14});
  read_weights(engine, stored.weights);
  for (int i = 0; i < 2; ++i) {
    engine.submit({.prompt = kPrompt,
                   .max_tokens = int64_t(expected.size()),
                   .sampling = {.temperature = 0},
                   .eos_token_ids = {-1},
                   .prompt_alternatives = 0});
  }
  std::array<std::vector<int32_t>, 2> found;
  std::array<double, 2> sums{};
  while (!engine.is_idle()) {
    for (const TokenEvent& event : engine.step()) {
      found[size_t(event.request)].push_back(event.token);
      sums[size_t(event.request)] -= double(event.log_prob);
      for (const auto& score : event.prompt) sums[size_t(event.request)] -= double(score.log_prob);
    }
  }
  const auto nll = test.expected["nll"].get<double>();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(found[i], expected) << where;
    EXPECT_NEAR(sums[i] / double(kPrompt.size() + expected.size() - 1), nll, 1e-5 * nll) << where;
  }
}

/// The forward pass of evaluation.
void check_loss(Communicator& tp, const StoredModel& stored, const FamilyCase& test) {
  std::vector<int32_t> tokens = kPrompt;
  for (const auto& token : test.expected["tokens"]) tokens.push_back(token.get<int32_t>());
  std::vector<int32_t> targets(tokens.begin() + 1, tokens.end());
  targets.push_back(-1);
  Transformer model(tp, stored.config,
                    {.batch = 1, .seq = int64_t(tokens.size()), .overlap = {Strategy::serial, 0}});
  load_parameters(stored.weights, model.parameter_list(), model.exec(), model.parameters());
  model.parameters_changed();
  const double loss = model.forward(tokens, targets) / double(tokens.size() - 1);
  const auto expected = test.expected["nll"].get<double>();
  EXPECT_NEAR(loss, expected, 1e-5 * expected) << test.name << ", tp " << tp.size();
}

TEST(Families, LogitsTokensAndLossesAreThoseOfTransformers) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const std::string folder = make_scratch_folder("families");
  size_t index = 0;
  for (const FamilyCase& test : family_cases()) {
    std::filesystem::remove_all(folder);
    const DType dtype = std::array{DType::f32, DType::bf16, DType::f16}[index++ % 3];
    write_folder(folder, test.expected["config"], dtype, dtype == DType::bf16 ? 3 : 1);
    const StoredModel stored = open_folder(folder);
    const auto parameters = ModelLayout(stored.config, 1, 0).parameters;
    EXPECT_EQ(stored.weights.tensors().size(), parameters.size());
    EXPECT_EQ(stored_parameters(stored.config, parameters).size(),
              test.expected["tensors"].get<size_t>());
    for (const int ranks : {1, 2, 4}) {  // of which four share two key and value heads
      WorldOptions world;
      world.ranks = ranks;
      run_threads(world, [&](Communicator& tp) {
        set_kernel_threads(1);
        check_generation(tp, stored, test);
        if (ranks < 4) check_engine(tp, stored, test);
        check_loss(tp, stored, test);
      });
    }
  }
  std::filesystem::remove_all(folder);
}

/// Gradients of the mean loss on `ranks` ranks.
Tensors gradients_on(int ranks, const StoredModel& stored, std::vector<int32_t> tokens) {
  ModelConfig config = stored.config;
  config.aux_loss_coeff = 0;
  const auto count = int64_t(tokens.size());
  Tensors whole;
  std::mutex mutex;
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, [&](Communicator& tp) {
    set_kernel_threads(1);
    Transformer model(tp, config, {.batch = 1, .seq = count, .overlap = {Strategy::serial, 0}});
    load_parameters(stored.weights, model.parameter_list(), model.exec(), model.parameters());
    model.parameters_changed();
    std::vector<int32_t> targets(tokens.begin() + 1, tokens.end());
    targets.push_back(-1);
    model.forward(tokens, targets);
    model.backward(1.0f / float(count - 1));
    Tensors local;
    collect(model.parameter_list(), HostCopy(model.exec(), model.gradients()).values(), local);
    const std::lock_guard lock(mutex);
    for (const auto& [name, values] : local) {
      whole[name].resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        if (values[i] != 0) whole[name][i] = values[i];  // other ranks' elements are 0 here
      }
    }
  });
  return whole;
}

/// Gradients by the tensors on disk.
Tensors fused(const ModelConfig& config, Tensors gradients) {
  const auto parameters = ModelLayout(config, 1, 0).parameters;
  Tensors all;
  for (const StoredParameters& stored : stored_parameters(config, parameters)) {
    int64_t elements = 1;
    for (const int64_t extent : stored.shape) elements *= extent;
    std::vector<float>& values = all[stored.name];
    values.resize(size_t(elements));
    for (const StoredParameter& slice : stored.slices) {
      const Parameter& p = parameters[slice.parameter];
      const std::vector<float>& from = gradients.at(p.name);
      const auto columns = int64_t(p.shape.size() > 1 ? p.shape[1] : p.shape[0]);
      for (int64_t i = 0; i < int64_t(from.size()); ++i) {
        const int64_t at =
            slice.first + i / columns * slice.row_stride + i % columns * slice.column_stride;
        values[size_t(at)] = from[size_t(i)];
      }
    }
  }
  return all;
}

/// Each gradient by its norm and its product with other pseudo-random numbers, to 1e-4.
void expect_gradients(const Tensors& found, const Json& expected, const std::string& where) {
  EXPECT_EQ(found.size(), expected.size()) << where;
  for (const auto& [name, values] : expected.items()) {
    ASSERT_TRUE(found.contains(name)) << where << name;
    double squares = 0, product = 0, probe_squares = 0;
    uint64_t index = 0;
    for (const float x : found.at(name)) {
      const double probe = weight(name + ".probe", index++);
      squares += double(x) * double(x);
      product += double(x) * probe;
      probe_squares += probe * probe;
    }
    const auto norm = values[0].get<double>();
    EXPECT_NEAR(std::sqrt(squares), norm, 1e-4 * norm) << where << name;
    const double spread = norm * std::sqrt(probe_squares / double(index));
    EXPECT_NEAR(product, values[1].get<double>(), 1e-4 * spread) << where << name;
  }
}

TEST(Families, GradientsAreThoseOfTransformers) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const Json all = Json::parse(read_file(TANDEM_TEST_FAMILIES "/gradients.json"));
  const std::string folder = make_scratch_folder("gradients");
  size_t compared = 0;
  for (const FamilyCase& test : family_cases()) {
    if (!all.contains(test.name)) continue;
    ++compared;
    std::filesystem::remove_all(folder);
    write_folder(folder, test.expected["config"], DType::f32, 1);
    const StoredModel stored = open_folder(folder);
    std::vector<int32_t> tokens = kPrompt;
    for (const auto& token : test.expected["tokens"]) tokens.push_back(token.get<int32_t>());
    for (const int ranks : {1, 2}) {
      const std::string where = fmt::format("{}, tp {}: ", test.name, ranks);
      expect_gradients(fused(stored.config, gradients_on(ranks, stored, tokens)), all[test.name],
                       where);
    }
  }
  EXPECT_EQ(compared, all.size());
  std::filesystem::remove_all(folder);
}

TEST(Families, ConfigurationsAreWrittenInTheirFamily) {
  for (const FamilyCase& test : family_cases()) {
    const Json& config = test.expected["config"];
    const ModelConfig model = model_config_from_json(config.dump(), "config.json");
    const Json written = Json::parse(to_json(model, DType::bf16));
    EXPECT_EQ(written["model_type"], config["model_type"]) << test.name;
    EXPECT_EQ(written["architectures"], config["architectures"]) << test.name;
    EXPECT_EQ(model_config_from_json(written.dump(), "written"), model) << test.name;
  }
}

TEST(Families, PublishedConfigurationsHaveTheirParameters) {
  const Json published = Json::parse(read_file(TANDEM_TEST_FAMILIES "/published.json"));
  for (const auto& [name, model] : published.items()) {
    const ModelConfig config = model_config_from_json(model["config"].dump(), name);
    EXPECT_EQ(config.parameters(), model["parameters"].get<int64_t>()) << name;
    const std::map<std::string, int64_t> windows = {{"Mistral-7B", 4096},
                                                    {"Phi-3-mini-4k", 2047},
                                                    {"Gemma-2-2B", 4096},
                                                    {"Gemma-3-1B", 512},
                                                    {"gpt-oss-20b", 128}};
    EXPECT_EQ(config.sliding_window, windows.contains(name) ? windows.at(name) : 0) << name;
    const bool alternates = name == "Gemma-2-2B" || name == "gpt-oss-20b";
    const int64_t freq = alternates ? 2 : name == "Gemma-3-1B" ? 6 : 0;
    EXPECT_EQ(config.full_attention_freq, freq) << name;
  }
}

TEST(Families, FusedTensorsAreChecked) {
  const std::string folder = make_scratch_folder("fused");
  const auto cases = family_cases();
  const auto phi3 = std::ranges::find(cases, "phi3, form 5", &FamilyCase::name);
  const std::string qkv = "model.layers.1.self_attn.qkv_proj.weight";
  const auto error_with = [&](auto change) -> std::string {
    std::filesystem::remove_all(folder);
    write_folder(folder, phi3->expected["config"], DType::bf16, 1);
    const SafetensorsFile file(folder + "/model.safetensors");
    std::vector<SafetensorsWriter::Spec> specs;
    std::vector<std::vector<std::byte>> data;
    for (const SafetensorsEntry& entry : file.entries()) {
      specs.push_back({entry.name, entry.dtype, entry.shape});
      data.push_back(file.data(entry));
      change(specs, data);
    }
    SafetensorsWriter writer(folder + "/model.safetensors", specs);
    for (const auto& each : data) writer.write(each);
    writer.finish();
    try {
      open_model(folder, [](const std::string&) {});
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(error_with([](auto&, auto&) {}), "accepted");
  const std::string narrow = error_with([&](auto& specs, auto& data) {
    if (specs.back().name != qkv) return;
    --specs.back().shape[0];
    data.back().resize(data.back().size() - 2 * size_t(specs.back().shape[1]));
  });
  EXPECT_NE(narrow.find("'" + qkv + "': bf16 [47, 32]: expected f32, bf16 or f16 [48, 32]"),
            std::string::npos)
      << narrow;
  const std::string twice = error_with([&](auto& specs, auto& data) {
    if (specs.back().name != qkv) return;
    specs.push_back({"model.layers.1.self_attn.k_proj.weight", DType::bf16, {8, 32}});
    data.push_back(std::vector<std::byte>(size_t{8} * 32 * 2));
  });
  EXPECT_NE(twice.find("'model.layers.1.self_attn.k_proj.weight': is in the files twice"),
            std::string::npos)
      << twice;
  std::filesystem::remove_all(folder);
}

TEST(Families, IndexAndFilesMustAgree) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const std::string folder = make_scratch_folder("index");
  const FamilyCase test = family_cases().front();
  write_folder(folder, test.expected["config"], DType::bf16, 3);
  const std::string path = folder + "/model.safetensors.index.json";
  const Json good = Json::parse(read_file(path));
  const auto error_with = [&](auto change) -> std::string {
    Json index = good;
    change(index);
    write_file(path, index.dump());
    try {
      open_folder(folder);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto expect = [&](const std::string& error, const char* text) {
    EXPECT_NE(error.find(text), std::string::npos) << error;
    EXPECT_NE(error.find(folder), std::string::npos) << error;
  };
  const std::string norm = "model.norm.weight";
  EXPECT_EQ(error_with([](Json&) {}), "accepted");
  expect(error_with([&](Json& i) { i["weight_map"].erase(norm); }),
         "tensor 'model.norm.weight': is in no file");
  expect(error_with([&](Json& i) { i["weight_map"]["x"] = "model-1-of-3.safetensors"; }),
         "tensor 'x': is missing, but in this file");
  expect(error_with([&](Json& i) { i["weight_map"]["x"] = "model-4-of-3.safetensors"; }),
         "model-4-of-3.safetensors");
  expect(error_with([&](Json& i) { i["weight_map"]["x"] = "../model-1-of-3.safetensors"; }),
         "expected the name of a .safetensors file in this folder");
  expect(error_with([&](Json& i) { i["weight_map"][norm] = 3; }), "'model.norm.weight' is in 3");
  expect(error_with([&](Json& i) { i["weight_map"] = Json::array(); }), "weight_map");
  expect(error_with([&](Json& i) {
           auto& map = i["weight_map"];
           map[norm] = map[norm] == "model-1-of-3.safetensors" ? "model-2-of-3.safetensors"
                                                               : "model-1-of-3.safetensors";
         }),
         "tensor 'model.norm.weight': is");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tandem
