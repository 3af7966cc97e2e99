#include "engine/report/tensorboard.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/formats/protobuf.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/lines.h"
#include "tandem/error.h"

namespace tandem::report {
namespace {

constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82f63b78u : 0);
    table[i] = value;
  }
  return table;
}();

/// Masked as in tfrecord, where a checksum may itself be among checked bytes.
uint32_t masked(uint32_t crc) {
  return std::rotr(crc, 15) + 0xa282ead8u;
}

template <typename T>
void append_bytes(std::string& to, T value) {
  static_assert(std::endian::native == std::endian::little);
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  to.append(bytes, sizeof value);
}

/// Event with its time (1) and step (2).
std::string event_head(double time_s, int64_t step) {
  std::string event;
  append_key(event, 1, ProtoWire::eight_bytes);
  append_bytes(event, time_s);
  append_number(event, 2, uint64_t(step));
  return event;
}

/// Event with a summary (5) of values (1): tag (1) and simple_value (2).
std::string event_of(const StepScalars& step) {
  std::string summary;
  for (const auto& [name, number] : step.values) {
    std::string value;
    append_counted(value, 1, name);
    append_key(value, 2, ProtoWire::four_bytes);
    append_bytes(value, number);
    append_counted(summary, 1, value);
  }
  std::string event = event_head(step.time_s, step.step);
  append_counted(event, 5, summary);
  return event;
}

void append_record(std::string& to, std::string_view data) {
  std::string length;
  append_bytes(length, uint64_t(data.size()));
  to += length;
  append_bytes(to, masked(crc32c(length)));
  to += data;
  append_bytes(to, masked(crc32c(data)));
}

/// Name in TensorBoard, which groups names by what is before the slash; "" for what it does not
/// show.
std::string scalar_name(const std::string& key) {
  if (key == "step") return "";
  for (const char* quality : {"loss", "validation_loss", "aux_loss", "grad_norm", "lr"}) {
    if (key == quality) return "training/" + key;
  }
  for (const char* speed : {"tokens_per_s", "step_ms", "mfu"}) {
    if (key == speed) return "speed/" + key;
  }
  const std::string_view kind = std::string_view(key).substr(0, key.find('.'));
  if (kind.ends_with("_ms") || key == "bubble") return "time/" + key;
  if (kind.ends_with("_bytes")) return "bytes/" + key;
  return "steps/" + key;
}

/// Numbers of a step; those of objects have names like sent_bytes.tp.
void add_scalars(const nlohmann::ordered_json& entry, const std::string& prefix,
                 StepScalars& step) {
  for (const auto& [key, value] : entry.items()) {
    if (value.is_object()) add_scalars(value, prefix + key + ".", step);
    const std::string name = value.is_number() ? scalar_name(prefix + key) : "";
    if (!name.empty()) step.values.emplace_back(name, value.get<float>());
  }
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char byte : bytes) crc = kCrcTable[(crc ^ uint8_t(byte)) & 255] ^ (crc >> 8);
  return ~crc;
}

std::string event_file(const std::vector<StepScalars>& steps) {
  std::string version = event_head(steps.empty() ? 0 : steps.front().time_s, 0);
  append_counted(version, 3, "brain.Event:2");
  std::string file;
  append_record(file, version);
  for (const StepScalars& step : steps) append_record(file, event_of(step));
  return file;
}

std::pair<std::string, size_t> write_tensorboard(const std::string& dir) {
  const std::string log = dir + "/metrics.jsonl";
  std::vector<StepScalars> steps;
  std::vector<double> seconds;
  for (const std::string_view line : Lines(read_file(log))) {
    const auto entry = parse_json<nlohmann::ordered_json>(line);
    if (!entry.is_object() || !entry.contains("step") || !entry["step"].is_number_integer()) {
      continue;  // a line that is being written
    }
    StepScalars& step = steps.emplace_back();
    step.step = entry["step"].get<int64_t>();
    add_scalars(entry, "", step);
    const auto ms = entry.find("step_ms");
    seconds.push_back(ms != entry.end() && ms->is_number() ? ms->get<double>() / 1e3 : 0);
  }
  if (steps.empty()) throw IoError(log + ": no step: expected those of a run");
  const auto age =
      std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(log);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  double time_s =
      std::chrono::duration<double>(now).count() - std::chrono::duration<double>(age).count();
  for (size_t i = steps.size(); i-- > 0;) {
    steps[i].time_s = time_s;
    time_s -= seconds[i];
  }
  const std::string folder = dir + "/tensorboard";
  make_directories(folder);
  const std::string path = folder + "/events.out.tfevents.tandem";
  replace_file(path, event_file(steps));
  return {path, steps.size()};
}

}  // namespace tandem::report
