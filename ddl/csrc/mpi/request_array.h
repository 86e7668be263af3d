// MPI requests in flight, each with what it is for: one MPI_Testsome moves all of them along.
#pragma once

#include <algorithm>
#include <vector>

#include "mpi/mpi_call.h"

namespace ddl {

// Slots are given out from the lowest on: those in use stay together, and few slots are tested if few are in flight.
template <typename Part>
class RequestArray {
  public:
    // So that `count` calls of add() cannot fail. Throws std::bad_alloc; then nothing has changed.
    void make_room(size_t count) {
        const size_t slots = in_use_ + count;
        if (slots <= parts_.size()) return;
        grow(parts_, slots);
        grow(done_, slots);
        grow(statuses_, slots);
        grow(requests_, slots);
        grow(is_used_, slots);
        parts_.resize(slots);
        done_.resize(slots);
        statuses_.resize(slots);
        requests_.resize(slots, MPI_REQUEST_NULL);
        is_used_.resize(slots);
    }

    // Takes a slot for `part`; its request is null until the caller posts one.
    size_t add(Part part) {
        make_room(1);
        while (is_used_[lowest_]) ++lowest_;
        const size_t index = lowest_;
        parts_[index] = std::move(part);
        is_used_[index] = true;
        ++in_use_;
        end_ = std::max(end_, index + 1);
        return index;
    }

    // Frees a slot whose request is over.
    void remove(size_t index) {
        requests_[index] = MPI_REQUEST_NULL;
        parts_[index] = Part{};
        is_used_[index] = false;
        --in_use_;
        lowest_ = std::min(lowest_, index);
        while (end_ > 0 && !is_used_[end_ - 1]) --end_;
    }

    bool empty() const { return in_use_ == 0; }
    size_t end() const { return end_; }  // slots from here on are free
    bool is_used(size_t index) const { return is_used_[index]; }
    Part& part(size_t index) { return parts_[index]; }
    MPI_Request& request(size_t index) { return requests_[index]; }

    // Moves messages along. Calls `finished(index, status, error)` for each request that is over, which removes the
    // slot or posts another request in it.
    template <typename Finished>
    void test_some(Finished finished) {
        if (end_ == 0) return;
        int count = 0;
        const int result =
            MPI_Testsome(static_cast<int>(end_), requests_.data(), &count, done_.data(), statuses_.data());
        if (result != MPI_SUCCESS && result != MPI_ERR_IN_STATUS) return test_each(result, finished);
        if (count == MPI_UNDEFINED) return;
        for (int i = 0; i < count; ++i) {
            const MPI_Status& status = statuses_[static_cast<size_t>(i)];
            finished(static_cast<size_t>(done_[static_cast<size_t>(i)]), status,
                     result == MPI_ERR_IN_STATUS ? status.MPI_ERROR : MPI_SUCCESS);
        }
    }

  private:
    // After MPI_Testsome failed as a whole with `error`, so that nothing it said counts.
    template <typename Finished>
    void test_each(int error, Finished finished) {
        for (size_t index = 0; index < end_; ++index) {
            if (!is_used_[index]) continue;
            MPI_Status status{};
            int is_over = 1, found = error;  // of a request that it has ended nobody learns how
            if (requests_[index] != MPI_REQUEST_NULL) found = MPI_Test(&requests_[index], &is_over, &status);
            if (is_over || found != MPI_SUCCESS) finished(index, status, found);
        }
    }

    template <typename Element>
    static void grow(std::vector<Element>& elements, size_t size) {
        if (elements.capacity() < size) elements.reserve(2 * size);
    }

    std::vector<MPI_Request> requests_;  // null if a slot is free
    std::vector<Part> parts_;
    std::vector<char> is_used_;
    size_t in_use_ = 0;
    size_t lowest_ = 0;  // no slot below it is free
    size_t end_ = 0;
    std::vector<int> done_;  // of test_some()
    std::vector<MPI_Status> statuses_;
};

}  // namespace ddl
