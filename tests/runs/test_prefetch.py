"""After --prefetch a run needs no hub."""


def test_after_prefetch_the_run_needs_no_hub(script, hub, tmp_path):
    """On a head node, with the flags of the job: what only the job's machine needs is not asked."""
    work = "--model gpt2 --num_samples 4 --seq_length 32 --max_steps 1 --no_eval".split()
    work += "--no_export --precision fp32".split()
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path / "hf"}
    folder = tmp_path / "out"
    of_the_job = "--prefetch --strategy infinity --nvme_path /no/such/disk".split()
    first = script(*work, *of_the_job, env=env, folder=folder)
    assert "Prefetched" in first.out and not folder.exists()
    cached = sorted((tmp_path / "hf" / "distributed_training").iterdir())
    hub.close()
    run = script(*work, env={**env, "HF_HUB_OFFLINE": "1"}, folder=folder)
    assert run.results["status"] == "completed" and len(run.losses) == 1
    # It was not tokenized a second time.
    assert sorted((tmp_path / "hf" / "distributed_training").iterdir()) == cached


def test_a_local_model_is_read_and_not_downloaded(script, llama, text_file, tmp_path):
    cache = tmp_path / "cache"
    run = script(*f"--model {llama} --dataset {text_file} --prefetch --cache_dir {cache}".split())
    assert "ownload" not in run.out and f"tokens in {cache}" in run.out and any(cache.iterdir())
