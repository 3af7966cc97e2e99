#include "engine/plan/codecs/codec_sweep.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/system/json.h"
#include "engine/plan/codecs/codec_search.h"

namespace tandem {

namespace {

constexpr const char* kCaveat =
    "Bits per byte of one model on one text: they prove nothing about the accuracy of large models "
    "in their tasks, and 4 bits are known to break single models.";

nlohmann::ordered_json training_json(const std::optional<TrainingRecord>& training) {
  if (!training) return nullptr;
  nlohmann::ordered_json bytes;
  if (training->bytes_seen) bytes = *training->bytes_seen;
  return {{"seed", training->seed},
          {"steps", training->steps},
          {"bytes_seen", bytes},
          {"command", "tandem train config.toml --out out/model"},
          {"config.toml", training->config}};
}

}  // namespace

std::vector<Wire> sweep_wires() {
  std::vector<Wire> all;
  for (const char* text : {"none",
                           "lossless",
                           "int8",
                           "int8:g64",
                           "int8:g32",
                           "int6",
                           "int6:g64",
                           "int6:g32",
                           "int5",
                           "int5:g64",
                           "int5:g32",
                           "int4",
                           "int4:g64",
                           "int4:g32",
                           "int4:g16",
                           "int4:g32:asym",
                           "int4:g32:hadamard",
                           "int3",
                           "int3:g64",
                           "int3:g32",
                           "int3:g16",
                           "int3:g32:asym",
                           "int3:g32:spikes",
                           "int2",
                           "int2:g64",
                           "int2:g32",
                           "int2:g16",
                           "int2:g32:asym",
                           "int2:g64:asym:spikes",
                           "e4m3",
                           "e4m3:g32",
                           "e5m2",
                           "e5m2:g32",
                           "mxfp8",
                           "mxfp6",
                           "mxfp4"}) {
    all.push_back(Wire::parse(text));
  }
  return all;
}

double Sweep::bytes_per_token(const SweepPoint& point) const {
  return SentBytes{model, ranks, dtype}.of(codec_at(model, sites, point.wire));
}

std::string Sweep::table() const {
  std::string text =
      "| codec | bits per element | bytes sent per token and rank | bits per byte | rise |\n"
      "| --- | --- | --- | --- | --- |\n";
  for (const SweepPoint& point : points) {
    text += fmt::format("| {} | {:.3f} | {:.0f} | {:.4f} | {:+.3f} % |\n", point.wire.describe(),
                        point.wire.bits_per_element(dtype), bytes_per_token(point),
                        point.bits_per_byte, 100 * rise(point));
  }
  return text;
}

std::string Sweep::json() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const SweepPoint& point : points) {
    rows.push_back({{"codec", point.wire.describe()},
                    {"bits_per_element", point.wire.bits_per_element(dtype)},
                    {"bytes_per_token", bytes_per_token(point)},
                    {"bits_per_byte", point.bits_per_byte},
                    {"rise", rise(point)}});
  }
  nlohmann::ordered_json root{{"sweep", rows},
                              {"caveat", kCaveat},
                              {"training", training_json(training)},
                              {"sites", sites}};
  add_origin(root, {model, ranks, dtype}, bytes);
  return dump_json(root, 1) + "\n";
}

}  // namespace tandem
