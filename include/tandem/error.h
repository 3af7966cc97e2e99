// Typed errors. Every message is one line that names the thing, its value and what was expected.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tandem/export.h"

TANDEM_API_BEGIN
namespace tandem {

/// Base of everything this library throws. `exit_code()` is what the `tandem` program returns.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
  virtual int exit_code() const { return 1; }
};

/// A wrong shape, dtype, device, rank count or option value.
class InvalidArgument : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 2; }
};

/// A wrong configuration file, key or value.
class ConfigError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// A file that cannot be read, written or trusted.
class IoError : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 3; }
};

/// What was asked for is not in this build or not possible on this machine.
class Unsupported : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 4; }
};

/// Ranks called one collective with different arguments. Thrown on every rank.
class Mismatch : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// Where a wait stood: what it belongs to and what it was waiting for. -1 = not applicable.
struct WaitSite {
  std::string_view op = "wait";
  int peer = -1;
  int64_t tile = -1;
};

/// A wait passed its deadline. Names operator, rank, the peer waited for, tile and epoch. The tile
/// is what the operator waits for at a time: a tile of the result; on GPUs also a slice of one, a
/// piece of a shard, or the share of a block or channel.
class Timeout : public Error {
 public:
  Timeout(const WaitSite& site, int rank, uint64_t epoch, uint64_t seen, double seconds);
  /// The same with what else is known, such as the peer's call or the ranks' threads; may be empty.
  Timeout(const Timeout& other, const std::string& note);
  int exit_code() const override { return 5; }

  std::string op;
  int rank, peer;
  int64_t tile;
  uint64_t epoch;
};

/// Another rank called `abort`, or died; this rank's pending and later waits end with this.
class Aborted : public Error {
 public:
  Aborted(int rank, const std::string& reason_);
  int exit_code() const override { return 6; }

  int origin;          ///< the rank that aborted, -1 if unknown
  std::string reason;  ///< the message without that rank
};

/// A CUDA, cuBLASLt or NCCL call that failed.
class DeviceError : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 7; }
};

/// The process was asked to stop while it waited (set_wait_check).
class Interrupted : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 130; }
};

}  // namespace tandem
TANDEM_API_END
