// When a device has done a communication: what is put on its streams while the communication is issued.
//
// One that is asynchronous runs on a stream of the backend's own, of which only the backend knows. Each of its works has
// a profiling scope, such as `nccl:all_reduce`, whose end it calls with that stream current, as soon as the communication
// is on it: an event that is recorded then is over when the communication is. Of a send or a receive by itself NCCL calls
// it with the job's stream current, and of what is coalesced not before the work is gone: how these end is not seen. The
// scopes are listened to only while a communication is issued, as somebody who listens makes each node of a backward
// dearer. The work is not waited for and its future's value is not taken: both would have streams of the job wait, or
// memory be kept.

#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/record_function.h>

#include "device_times.hpp"

namespace dsprof {

// A communication, or several that are begun together, on its way to the device.
class DeviceIssue {
 public:
  // `begin`: on the stream that is current, before it is issued.
  explicit DeviceIssue(Moment* begin) : begin_(begin), outer_(std::exchange(current, this)) {
    if (!begin_) return;
    try {
      handle_ = at::addThreadLocalCallback(
          at::RecordFunctionCallback(&scope_begin, &scope_end).scopes({at::RecordScope::USER_SCOPE}));
    } catch (...) {
      count_error("the scopes of a device's communications");
    }
  }

  ~DeviceIssue() {
    stop_listening();
    current = outer_;
    device_times().drop(begin_);
    device_times().drop(end_);
  }

  DeviceIssue(const DeviceIssue&) = delete;
  DeviceIssue& operator=(const DeviceIssue&) = delete;

  void stop_listening() {
    if (handle_ != at::INVALID_CALLBACK_HANDLE) at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
  }

  // It has been issued: has the records completed when their stream is through with it. Where nothing told its end they
  // are done without one. `group`: what its communications run one after the other in; 0: they do not.
  void issued(const std::vector<Record*>& records, uint16_t group) {
    stop_listening();
    // One on the stream that it was issued from is not its own.
    if (begin_ && end_ && end_->stream != begin_->stream)
      device_times().ran(records, std::exchange(begin_, nullptr), std::exchange(end_, nullptr), group);
    else
      for (Record* record : records) publish(record, kDone);
  }

  // The same of what ran on the stream that is current. (A barrier's call returns when that is through with it: its scope
  // ended before.)
  void issued_here(const std::vector<Record*>& records, uint16_t group) {
    stop_listening();
    if (begin_ && !end_) end_ = device_times().now();
    if (begin_ && end_)
      device_times().ran_here(records, std::exchange(begin_, nullptr), std::exchange(end_, nullptr), group);
    else
      for (Record* record : records) publish(record, kDone);
  }

 private:
  struct Scope final : at::ObserverContext {
    explicit Scope(DeviceIssue* of) : of(of) {}
    DeviceIssue* const of;
  };

  // A scope of a backend is called as this is and what it does: `nccl:all_reduce`. gloo's are of what a debugging wrapper
  // does on the host before.
  static bool is_of_backend(const char* name) {
    const char* at = name;
    while (*at >= 'a' && *at <= 'z') at++;
    return at != name && at[0] == ':' && at[1] != ':' && strncmp(name, "gloo:", 5) != 0;
  }

  static std::unique_ptr<at::ObserverContext> scope_begin(const at::RecordFunction& scope) {
    if (!current || !is_of_backend(scope.name())) return nullptr;
    return std::make_unique<Scope>(current);
  }

  // The last one counts. One that ends later than its call, or on another thread, tells nothing.
  static void scope_end(const at::RecordFunction&, at::ObserverContext* context) {
    if (!context || !current || static_cast<Scope*>(context)->of != current) return;
    device_times().drop(std::exchange(current->end_, device_times().now()));
  }

  static inline thread_local DeviceIssue* current = nullptr;

  Moment *begin_, *end_ = nullptr;
  DeviceIssue* outer_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

// What this thread issues between `_start_coalescing` and `_end_coalescing`: it all begins with the latter.
struct Coalesced {
  bool gathering = false, here = true;  // `here`: all of it runs on the stream that is current
  std::vector<Record*> records;
  uint16_t group = 0;
  std::unique_ptr<DeviceIssue> issue;

  void begin() {
    issue.reset();
    for (Record* record : records) publish(record, kDone);  // of one that was given up
    records.clear();
    gathering = here = true;
  }

  void add(Record* record, uint16_t of, bool runs_here) {
    records.push_back(record);
    group = of;
    here &= runs_here;
  }

  // The last of it has been given; it is issued now.
  void issue_all() {
    gathering = false;
    if (!records.empty()) issue = std::make_unique<DeviceIssue>(device_times().now());
  }

  void issued() {
    if (issue && here)
      issue->issued_here(records, group);
    else if (issue)
      issue->issued(records, group);
    issue.reset();
    records.clear();
  }
};
inline thread_local Coalesced coalesced;

}  // namespace dsprof
