// Event files of TensorBoard: the numbers of a run's steps, as its reader for scalars takes them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem::report {

/// Checksum of Castagnoli (CRC-32C) of `bytes`.
uint32_t crc32c(std::string_view bytes);

/// Scalars of one step by their names.
struct StepScalars {
  int64_t step = 0;
  double time_s = 0;  ///< since 1970
  std::vector<std::pair<std::string, float>> values;
};

/// Content of an event file: a record of the version, then one for each step. A record is a length,
/// its masked checksum, an Event of TensorFlow's event.proto in the wire format of protobuf, and
/// that one's masked checksum (tfrecord).
std::string event_file(const std::vector<StepScalars>& steps);

/// Writes DIR/tensorboard/events.out.tfevents.tandem from DIR/metrics.jsonl, and returns its path
/// and the number of steps. The log has no times: the last step is taken to have ended when it was
/// written. Throws IoError, also if there is no step.
std::pair<std::string, size_t> write_tensorboard(const std::string& dir);

}  // namespace tandem::report
