// Folders of models with corrupted or lying files: every one is refused by an error that names a
// file of the folder, in one line, without much memory; or it is a model, and loads.
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/system/files.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/infer/sampling/generation_config.h"
#include "engine/model/layout.h"
#include "engine/model/pretrained.h"
#include "tandem/error.h"
#include "tests/engine/infer/quantized_folder.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;
using Json = nlohmann::ordered_json;

constexpr int64_t kMaxMemoryKib = 256 << 10;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}
  size_t below(size_t end) { return size_t(random_() % end); }

  /// Another value than JSON of its kind usually has.
  Json hostile_value(const Json& before) {
    const Json values[] = {nullptr,
                           true,
                           false,
                           0,
                           -1,
                           1,
                           3,
                           7,
                           int64_t{1} << 31,
                           int64_t{1} << 40,
                           std::numeric_limits<int64_t>::max(),
                           std::numeric_limits<uint64_t>::max(),
                           0.0,
                           -0.5,
                           1e-300,
                           1e300,
                           "",
                           "x",
                           "../x",
                           "F32",
                           std::string(5000, 'y'),
                           Json::array(),
                           Json::object(),
                           Json::array({1, 2, 3}),
                           Json::array({int64_t{1} << 40, int64_t{1} << 40}),
                           Json{{"rope_type", "yarn"}, {"factor", 1e300}}};
    if (before.is_number_integer() && below(2) == 0) {
      return before.get<int64_t>() + int64_t(below(9)) - 4;
    }
    return values[below(std::size(values))];
  }

  /// Changes one member somewhere: its value, its name, or whether it exists.
  void change(Json& root) {
    if (!root.is_structured() || root.empty()) {
      root = hostile_value(root);
      return;
    }
    auto at = std::next(root.begin(), std::ptrdiff_t(below(root.size())));
    if (at->is_structured() && !at->empty() && below(4) != 0) return change(*at);
    switch (root.is_object() ? below(5) : 2 + below(2)) {
      case 0: {  // another name
        const Json value = *at;
        std::string name = at.key();
        if (name.empty()) name = "x";
        name[below(name.size())] ^= 1;
        root.erase(at.key());
        root[name] = value;
        return;
      }
      case 1:
        root.erase(at.key());
        return;
      case 2:  // the value of another member
        *at = Json(*(std::next(root.begin(), std::ptrdiff_t(below(root.size())))));
        return;
      default:
        *at = hostile_value(*at);
    }
  }

  std::string change_json(const std::string& text) {
    Json root = Json::parse(text);
    for (size_t i = 0; i <= below(3); ++i) change(root);
    return root.dump();
  }

  std::string change_bytes(std::string text, size_t end) {
    switch (below(4)) {
      case 0:
        text.resize(below(text.size()));
        break;
      case 1:
        text.insert(below(end), std::string(1 + below(9), char(random_())));
        break;
      case 2:
        text.erase(below(end), 1 + below(9));
        break;
      default:
        for (size_t i = 0; i <= below(4); ++i) text[below(end)] = char(random_());
    }
    return text;
  }

  /// Changes a safetensors file's header, with its length as it then is or a wrong one.
  std::string change_header(const std::string& text) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, text.data(), sizeof bytes);
    const size_t end = sizeof bytes + size_t(bytes);
    if (below(3) == 0) return change_bytes(text, end);
    const std::string header = change_json(text.substr(sizeof bytes, size_t(bytes)));
    bytes = below(8) == 0 ? random_() >> below(64) : header.size();
    std::string changed(sizeof bytes, '\0');
    std::memcpy(changed.data(), &bytes, sizeof bytes);
    return changed + header + text.substr(end);
  }

 private:
  std::mt19937_64 random_;
};

int64_t peak_kib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

/// Whether the folder was refused; the error must name a file in it.
bool is_refused(const std::string& folder) {
  const auto ignore = [](const std::string&) {};
  try {
    const StoredModel stored = open_model(folder, ignore);
    read_generation_defaults(stored, ignore);
    for (int rank = 0; rank < 2 && stored.config.heads % 2 == 0; ++rank) {
      const ModelLayout layout(stored.config, 2, rank);
      std::vector<float> values(size_t(layout.size));
      load_parameters(stored.weights, layout.parameters, {}, flat(values));
    }
    return false;
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(folder), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_LE(text.size(), 2000u) << text;
    return true;
  }
}

void refuse_mutations(uint64_t seed, int count) {
  const std::string folder = make_scratch_folder("hostile");
  std::vector<FamilyCase> cases = family_cases();
  const std::vector<QuantizedCase> quantized = quantized_cases();
  Mutator mutator(seed);
  int refused = 0;
  const int64_t before = peak_kib();
  std::string name;
  bool is_quantized = false;
  for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    if (i % 50 == 0) {  // another model
      std::filesystem::remove_all(folder);
      const Json& config = cases[mutator.below(cases.size())].expected["config"];
      is_quantized = i % 100 == 50;
      if (is_quantized) {
        write_quantized_folder(folder, config, quantized[mutator.below(quantized.size())]);
      } else {
        write_folder(folder, config, DType::bf16, 2);
      }
      write_file(folder + "/generation_config.json",
                 R"({"eos_token_id": [1, 2], "do_sample": true, "temperature": 0.5, "top_k": 3})");
      ASSERT_FALSE(is_refused(folder));
    }
    std::vector<std::string> names{"config.json", "generation_config.json"};
    if (is_quantized) {
      names.insert(names.end(), 2, "model.safetensors");
    } else {
      names.insert(names.end(), {"model.safetensors.index.json", "model-1-of-2.safetensors",
                                 "model-2-of-2.safetensors"});
    }
    name = names[mutator.below(names.size())];
    const std::string path = folder + "/" + name, good = read_file(path);
    const bool is_json = name.ends_with(".json");
    const std::string bad = !is_json           ? mutator.change_header(good)
                            : mutator.below(3) ? mutator.change_json(good)
                                               : mutator.change_bytes(good, good.size());
    write_file(path, bad);
    refused += is_refused(folder);
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "seed " << seed << ", case " << i << ": " << name << ":\n"
                    << bad.substr(0, 3000);
    }
    write_file(path, good);
  }
  EXPECT_LE(peak_kib() - before, kMaxMemoryKib);
  EXPECT_GT(refused, count / 2);
  std::filesystem::remove_all(folder);
}

TEST(HostileModel, CorruptedFilesAreRefusedByName) {
  refuse_mutations(1, 500);
}

TEST(HostileModelLong, CorruptedFilesAreRefusedByName) {
  refuse_mutations(2, 10000);
}

}  // namespace
}  // namespace tandem
