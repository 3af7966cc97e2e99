// Runs one thread per rank of a world and selects the error to report if some of them fail.
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace tandem::threads {

/// Runs body(rank) for each of `ranks`, each on its own thread, and returns when all have ended. If
/// one throws, abort(rank, reason) is called on that thread (with rank -1 on this one, if no more
/// threads could be started). Returns the first error, an Aborted only if there is no other;
/// nullptr if there is none.
std::exception_ptr run_each_rank(
    int ranks, const std::function<void(int rank)>& body,
    const std::function<void(int rank, const std::string& reason)>& abort);

}  // namespace tandem::threads
