// Typed errors. Every message is one line with the object, its value and the expected value.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tandem/export.h"

TANDEM_API_BEGIN
namespace tandem {

/// Base of all exceptions of this library. `exit_code()` is the exit status of the `tandem`
/// program.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
  virtual int exit_code() const { return 1; }
};

/// Invalid shape, dtype, device, rank count or option value.
class InvalidArgument : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 2; }
};

/// Invalid configuration file, key or value.
class ConfigError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// File that cannot be read, written or trusted.
class IoError : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 3; }
};

/// Request that this build or this machine cannot serve.
class Unsupported : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 4; }
};

/// Different arguments to one collective on different ranks. Thrown on every rank.
class Mismatch : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// Location of a wait: its operator, and the peer and tile it waits for. -1 = not applicable.
struct WaitSite {
  std::string_view op = "wait";
  int peer = -1;
  int64_t tile = -1;
};

/// Wait that passed its deadline. Names operator, rank, awaited peer, tile and epoch. The tile is
/// the operator's unit of waiting: a tile of the result; on GPUs also a slice of one, a chunk of a
/// shard, or the share of a block or channel.
class Timeout : public Error {
 public:
  Timeout(const WaitSite& site, int rank, uint64_t epoch, uint64_t seen, double seconds);
  /// Copy of `other` with further information, such as the peer's call or the ranks' threads;
  /// `note` may be empty.
  Timeout(const Timeout& other, const std::string& note);
  int exit_code() const override { return 5; }

  std::string op;
  int rank, peer;
  int64_t tile;
  uint64_t epoch;
};

/// Another rank called `abort` or died; pending and later waits of this rank throw this.
class Aborted : public Error {
 public:
  Aborted(int rank, const std::string& reason_);
  int exit_code() const override { return 6; }

  int origin;          ///< rank that aborted, -1 if unknown
  std::string reason;  ///< message without that rank
};

/// Failed CUDA, cuBLASLt or NCCL call.
class DeviceError : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 7; }
};

/// Request to stop the process, received during a wait (set_wait_check).
class Interrupted : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 130; }
};

}  // namespace tandem
TANDEM_API_END
